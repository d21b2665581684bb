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


def manager(mode: str, **options: Any) -> Any:
    """As the runner makes it, but for graphs and device; adapters in steps are 0 or 5."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    found = object.__new__(CudaGraphManager)
    found.vllm_config = SimpleNamespace(
        additional_config={"preft": options},
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    found.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8)
    found.cudagraph_mode = CUDAGraphMode[mode]
    found.max_num_reqs, found.decode_query_len, found.varlen_decode, found.ubatch_runner = 4, 1, False, None
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


SIZES = [1, 2, 4, 8]
ALL = {(size, adapters) for size in SIZES for adapters in (0, 5)}


def test_decode_graphs_are_captured_without_adapters_only() -> None:
    assert captured(manager("FULL_AND_PIECEWISE")) == {"FULL": {(1, 0), (2, 0), (4, 0)}, "PIECEWISE": ALL}
    assert captured(manager("FULL_DECODE_ONLY")) == {"FULL": {(1, 0), (2, 0), (4, 0)}}


def test_an_engine_with_all_token_adapters_keeps_them() -> None:
    both = {(size, adapters) for size in SIZES[:3] for adapters in (0, 5)}
    assert captured(manager("FULL_AND_PIECEWISE", all_token_adapters=True)) == {"FULL": both, "PIECEWISE": ALL}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_graphs_that_mixed_steps_replay_stay(mode: str) -> None:
    assert captured(manager(mode)) == {mode: ALL}


def test_decode_steps_replay_theirs_and_others_those_of_mixed_steps() -> None:
    found = manager("FULL_AND_PIECEWISE")
    for adapters, mode in ((0, "FULL"), (1, "PIECEWISE"), (5, "PIECEWISE")):
        desc = found.dispatch(num_reqs=3, num_tokens=3, uniform_token_count=1, num_active_loras=adapters)
        assert (desc.cg_mode.name, desc.num_tokens, desc.num_active_loras > 0) == (mode, 4, adapters > 0)
    mixed = found.dispatch(num_reqs=2, num_tokens=7, uniform_token_count=None, num_active_loras=0)
    assert (mixed.cg_mode.name, mixed.num_tokens) == ("PIECEWISE", 8)
    alone = manager("FULL_DECODE_ONLY").dispatch(num_reqs=3, num_tokens=3, uniform_token_count=1, num_active_loras=1)
    assert alone.cg_mode.name == "NONE"
