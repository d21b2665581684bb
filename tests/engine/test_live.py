"""A trainer replaces an adapter's weights in an engine of its own process: answers come from the new ones, never from old KV.

A random Llama of two layers in float32, prefix caching on, several requests at once; a wrong version differs by whole units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.errors import PreftError
from engine_patch.live import LiveAdapter
from engine_patch.requests import lora_request
from engine_patch.store.file import write_adapter
from preft_cli.models import BaseModel
from preft_cli.models.modules import modules_of
from tests.reference import MaskedReference, random_adapter
from tests.schedules.models import tiny_llama

pytestmark = pytest.mark.engine

BLOCK = 32
TOLERANCE = 1e-3
PROMPTS = [[(7 * i + 13 * j) % 500 for i in range(length)] for j, length in enumerate((4 * BLOCK + 7, 33, 70, 1))]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return tiny_llama(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def reference(base: BaseModel) -> MaskedReference:
    return MaskedReference(base.path)


@pytest.fixture(scope="module")
def llm(base: BaseModel) -> Iterator[Any]:
    """In this process, as a trainer has it; its traces in the process go with it."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it on a CPU
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with torch.random.fork_rng():
            engine = LLM(
                str(base.path),
                dtype="float32",
                enable_lora=True,
                max_loras=2,
                max_lora_rank=16,
                max_model_len=256,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                block_size=BLOCK,
                num_gpu_blocks_override=64,
                kv_cache_memory_bytes=1 << 26,
                enforce_eager=True,
                logprobs_mode="processed_logprobs",
                skip_tokenizer_init=True,
                disable_log_stats=False,
            )
        yield engine
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()


@pytest.fixture
def made(llm: Any, base: BaseModel) -> Iterator[Any]:
    """Live adapters, which go with the test."""
    opened: list[LiveAdapter] = []

    def make(method: str, **options: Any) -> LiveAdapter:
        opened.append(LiveAdapter(llm, "policy", method, base.fingerprint, **options))
        return opened[-1]

    yield make
    for live in opened:
        live.close()


def weights(base: BaseModel, method: str, seed: int, rank: int = 8) -> Adapter:
    """Loud ones: another version's answers have nothing to do with them."""
    return random_adapter(modules_of(base), base.fingerprint, seed=seed, rank=rank, method=method, loud=2.0)


def as_trained(adapter: Adapter) -> dict[str, LowRankPair]:
    """As a trainer holds it: parameters, and W2 by rows."""
    return {
        name: LowRankPair(
            torch.nn.Parameter(pair.a), torch.nn.Parameter(pair.b.t().contiguous()).t(), pair.scaling, pair.bias
        )
        for name, pair in adapter.pairs.items()
    }


def sampling(temperature: float, **more: Any) -> Any:
    from vllm import SamplingParams

    given = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0, "detokenize": False, **more}
    return SamplingParams(temperature=temperature, **given)


def expected(
    reference: MaskedReference, prompt: list[int], tokens: list[int], adapter: Adapter | None, temperature: float
) -> torch.Tensor:
    """Log-probability of each token under the distribution that it was drawn from."""
    ids = prompt + tokens
    mask = torch.zeros(len(ids), 1)
    mask[: len(ids) if adapter is not None and adapter.method == "lora" else len(prompt)] = 1
    with torch.no_grad(), reference._adapted(adapter, mask):
        logits = reference.model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    return (logits / (temperature or 1.0)).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check(reference: MaskedReference, outputs: list[Any], adapter: Adapter | None, temperature: float) -> None:
    """Every sample of every answer equals the reference."""
    for output in outputs:
        for sample in output.outputs:
            tokens = list(sample.token_ids)
            assert len(tokens) == NEW_TOKENS
            served = torch.tensor([step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)])
            gap = (
                (served - expected(reference, list(output.prompt_token_ids), tokens, adapter, temperature)).abs().max()
            )
            assert gap < TOLERANCE, f"{len(output.prompt_token_ids)} prompt tokens: log-probabilities differ by {gap}"


def ask(llm: Any, adapter: Any, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    found: list[Any] = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], params, lora_request=adapter, use_tqdm=False
    )
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("method", ["lorap", "direftp", "lora"])
def test_after_a_sync_rollouts_equal_the_reference_on_a_warm_cache(
    llm: Any, base: BaseModel, reference: MaskedReference, made: Any, method: str, temperature: float
) -> None:
    """The cache is warm of the former version, of the same prompts; and it is used within a version."""
    live = made(method)
    params = sampling(temperature)
    for seed in (1, 2, 3):
        adapter = weights(base, method, seed, rank=8 if seed < 3 else 16)
        live.sync(as_trained(adapter))
        first = ask(llm, live.request, params)
        assert [output.num_cached_tokens for output in first] == [0] * len(PROMPTS)
        again = ask(llm, live.request, params)
        assert [output.num_cached_tokens for output in again] == [4 * BLOCK, BLOCK, 2 * BLOCK, 0]
        check(reference, first + again, adapter, temperature)
    old = expected(reference, PROMPTS[0], list(first[0].outputs[0].token_ids), weights(base, method, 2), temperature)
    served = torch.tensor([next(iter(step.values())).logprob for step in first[0].outputs[0].logprobs])
    assert (old - served).abs().max() > 100 * TOLERANCE


def test_samples_of_one_prompt_share_its_kv(llm: Any, base: BaseModel, reference: MaskedReference, made: Any) -> None:
    live = made("lorap")
    adapter = weights(base, "lorap", 4)
    live.sync(adapter.pairs)

    def hits() -> float:
        return next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")

    before = hits()
    (output,) = ask(llm, live.request, sampling(1.0, n=4), PROMPTS[:1])
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    assert hits() - before == 3 * 4 * BLOCK
    check(reference, [output], adapter, 1.0)


class Stepped:
    """The engine, step by step."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.ended: dict[str, Any] = {}

    def add(self, id_: str, adapter: Any, params: Any, prompt: list[int] = PROMPTS[0]) -> None:
        self.engine.add_request(id_, {"prompt_token_ids": prompt}, params, lora_request=adapter)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.ended |= {out.request_id: out for out in self.engine.step() if out.finished}

    def finish(self) -> dict[str, Any]:
        while self.engine.has_unfinished_requests():
            self.step()
        return self.ended


@pytest.mark.parametrize("method", ["lorap", "direftp", "lora"])
def test_a_request_in_flight_ends_on_the_version_it_began_with(
    llm: Any, base: BaseModel, reference: MaskedReference, made: Any, method: str
) -> None:
    """One is in the middle of its prompt, one decodes, one waits; the weights change twice, and another comes after each."""
    live, stepped, params = made(method), Stepped(llm), sampling(1.0)
    adapters = [weights(base, method, seed) for seed in (10, 11, 12)]
    live.sync(adapters[0].pairs)
    stepped.add("decodes", live.request, params, PROMPTS[1])
    stepped.step(3)
    stepped.add("prompt", live.request, params)
    stepped.step(1)
    stepped.add("waits", live.request, params, PROMPTS[2])
    live.sync(adapters[1].pairs)
    stepped.add("second", live.request, params)
    stepped.step(4)
    tiers = live._tiers
    assert len(list(tiers.live)) == 2
    live.sync(adapters[2].pairs)
    stepped.add("third", live.request, params)
    stepped.add("base", None, params)
    ended = stepped.finish()
    for ids, adapter in ((("decodes", "prompt", "waits"), 0), (("second",), 1), (("third",), 2), (("base",), None)):
        check(reference, [ended[id_] for id_ in ids], None if adapter is None else adapters[adapter], 1.0)
    ask(llm, live.request, params)
    assert len(list(tiers.live)) == 1, "former versions gave back their pages"


def test_a_request_that_is_preempted_after_the_sync_computes_its_prompt_with_the_old_weights(
    llm: Any, base: BaseModel, reference: MaskedReference, made: Any
) -> None:
    live, stepped, params = made("lorap"), Stepped(llm), sampling(1.0)
    adapters = [weights(base, "lorap", seed) for seed in (20, 21)]
    live.sync(adapters[0].pairs)
    stepped.add("old", live.request, params)
    stepped.step(6)
    live.sync(adapters[1].pairs)
    scheduler = live._core.scheduler
    (request,) = scheduler.running
    assert request.num_output_tokens > 0
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not scheduler.running
    stepped.add("new", live.request, params)
    ended = stepped.finish()
    check(reference, [ended["old"]], adapters[0], 1.0)
    check(reference, [ended["new"]], adapters[1], 1.0)


def test_requests_in_flight_are_aborted_if_so_configured(
    llm: Any, base: BaseModel, reference: MaskedReference, made: Any
) -> None:
    live, stepped, params = made("lorap", in_flight="abort"), Stepped(llm), sampling(1.0)
    adapters = [weights(base, "lorap", seed) for seed in (30, 31)]
    live.sync(adapters[0].pairs)
    stepped.add("base", None, params)
    stepped.add("samples", live.request, sampling(1.0, n=3))
    stepped.step(4)
    stepped.add("waits", live.request, params)
    live.sync(adapters[1].pairs)
    assert [request.lora_request for request in live._core.scheduler.requests.values()] == [None]
    stepped.add("new", live.request, params)
    ended = stepped.finish()
    assert ended.keys() == {"base", "new"}
    check(reference, [ended["base"]], None, 1.0)
    check(reference, [ended["new"]], adapters[1], 1.0)


def test_files_come_and_go_beside_it(
    llm: Any, base: BaseModel, reference: MaskedReference, made: Any, tmp_path: Path
) -> None:
    """More of them than the pool holds; and whoever asks for a version that is gone gets an error, and no answer."""
    live, params = made("lorap"), sampling(1.0)
    adapter = weights(base, "lorap", 40)
    live.sync(weights(base, "lorap", 41).pairs)
    gone = live.request
    live.sync(adapter.pairs)
    pools = live._tiers
    for seed in range(6):
        other = weights(base, "lorap", seed, rank=16)
        write_adapter(tmp_path / f"{seed}.preft", other)
        outputs = ask(llm, lora_request(str(seed), tmp_path / f"{seed}.preft"), params, PROMPTS[1:2])
        check(reference, outputs, other, 1.0)
    assert pools.count().device.evictions > 2
    assert not llm.llm_engine.remove_lora(live.request.lora_int_id)
    check(reference, ask(llm, live.request, params), adapter, 1.0)
    (refused,) = ask(llm, gone, params, PROMPTS[1:2])
    assert refused.outputs[0].finish_reason == "error"
    assert not refused.outputs[0].token_ids


def test_the_base_model_s_weights_never_change(
    llm: Any, base: BaseModel, reference: MaskedReference, made: Any
) -> None:
    """Case 25: their hash, and the base model's answers."""

    def digest(worker: Any) -> str:
        found = hashlib.sha256()
        for name, tensor in sorted(worker.model_runner.model.state_dict().items()):
            found.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return found.hexdigest()

    (before,) = llm.collective_rpc(digest)
    live = made("lora")
    for seed in (50, 51):
        live.sync(weights(base, "lora", seed, rank=16).pairs)
        ask(llm, live.request, sampling(1.0))
    assert llm.collective_rpc(digest) == [before]
    check(reference, ask(llm, None, sampling(0.6)), None, 0.6)


def test_what_the_engine_cannot_serve_is_refused(llm: Any, base: BaseModel, made: Any) -> None:
    live = made("lorap")
    with pytest.raises(PreftError, match="has rank 17, this server holds up to 16"):
        live.sync(weights(base, "lorap", 1, rank=17).pairs)
    with pytest.raises(PreftError, match="holds DiReFT interventions, which a lorap adapter has not"):
        live.sync({**weights(base, "lorap", 1).pairs, **weights(base, "direftp", 1).pairs})
    with pytest.raises(PreftError, match="has no weights yet"):
        _ = live.request
