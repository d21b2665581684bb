"""Which CUDA graphs would be captured, asked of vLLM's own manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_patch.runners import graphs


@pytest.fixture(autouse=True)
def patched(upstream: None) -> None:
    graphs.patch()


SIZES = [1, 2, 4, 8, 16, 28, 32]
ALL = {(size, adapters) for size in SIZES for adapters in (0, 5)}
FEWER = ALL - {(28, 5)}
"""32 serves as well."""


def manager(mode: str, varlen_decode: bool = False, query_len: int = 1, **options: Any) -> Any:
    """As the runner makes it, but for graphs and device; adapters in steps are 0 or 5."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    found = object.__new__(CudaGraphManager)
    found.vllm_config = SimpleNamespace(
        additional_config={"preft": options},
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    found.compilation_config = SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1])
    found.cudagraph_mode = CUDAGraphMode[mode]
    found.max_num_reqs, found.decode_query_len, found.varlen_decode, found.ubatch_runner = (
        4,
        query_len,
        varlen_decode,
        None,
    )
    found.lora_capture_cases = [0, 5]
    found._lora_dispatch_map, found._max_lora_case = found._build_lora_dispatch_map()
    found._candidates, found._capture_descs, found._graphs_captured = {}, {}, True
    found._init_candidates()
    return found


def captured(found: Any) -> dict[str, set[tuple[int, int]]]:
    """(tokens, adapters) of the graphs of each mode."""
    return {
        mode.name: {(desc.num_tokens, desc.num_active_loras) for desc in descs}
        for mode, descs in found._capture_descs.items()
    }


def test_decode_graphs_are_captured_without_adapters_only() -> None:
    alone = {(1, 0), (2, 0), (4, 0)}
    assert captured(manager("FULL_AND_PIECEWISE")) == {"FULL": alone, "PIECEWISE": FEWER}
    assert captured(manager("FULL_DECODE_ONLY")) == {"FULL": alone}


@pytest.mark.parametrize("varlen_decode", [False, True])
def test_so_are_those_of_several_tokens_a_request(varlen_decode: bool) -> None:
    """As speculative decoding has them, whose sizes differ from those of mixed steps."""
    found = captured(manager("FULL_AND_PIECEWISE", varlen_decode, query_len=3))
    assert {adapters for _, adapters in found["FULL"]} == {0}
    assert found["PIECEWISE"] == FEWER


def test_an_engine_with_all_token_adapters_keeps_them() -> None:
    both = {(size, adapters) for size in SIZES[:3] for adapters in (0, 5)}
    assert captured(manager("FULL_AND_PIECEWISE", all_token_adapters=True)) == {"FULL": both, "PIECEWISE": ALL}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_graphs_that_mixed_steps_replay_stay(mode: str) -> None:
    assert captured(manager(mode)) == {mode: FEWER}


def test_a_size_of_vllm_grows_by_a_quarter_at_most() -> None:
    vllm = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)}
    kept = graphs.keep_sizes(vllm)
    assert max(kept) == 512
    assert len(kept) < 22 < len(vllm)
    for size in vllm:
        larger = min(other for other in kept if other >= size)
        assert larger <= size / graphs.NEXT_SIZE


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE"])
def test_every_step_replays_the_smallest_graph_that_fits(mode: str) -> None:
    found = manager(mode)
    kept = captured(found)
    for num_tokens in range(1, 36):
        for adapters, key in ((0, 0), (1, 5), (5, 5)):
            for uniform in (1, None):
                desc = found.dispatch(num_tokens, num_tokens, uniform, adapters)
                usable = {
                    size
                    for name, graph in kept.items()
                    for size, with_adapters in graph
                    if size >= num_tokens
                    and with_adapters == key
                    and (name != "FULL" or mode == "FULL" or uniform)
                    and (mode != "FULL" or num_tokens <= 4)
                }
                assert (desc.num_tokens if desc.cg_mode.name != "NONE" else None) == (min(usable) if usable else None)
                assert desc.cg_mode.name in {"NONE", *kept}


def test_decode_steps_replay_theirs_and_those_with_an_adapter_the_graphs_of_mixed_steps() -> None:
    found = manager("FULL_AND_PIECEWISE")
    for adapters, mode in ((0, "FULL"), (1, "PIECEWISE"), (5, "PIECEWISE")):
        assert found.dispatch(3, 3, 1, adapters).cg_mode.name == mode
