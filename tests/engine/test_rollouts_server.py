"""Rollouts from a real `preft serve` of a tiny model, whose API key is asked for and whose own defaults of sampling are odd."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine_patch.adapter import Adapter
from preft_cli.errors import UserError
from preft_cli.models import BaseModel
from preft_cli.models.modules import modules_of
from preft_cli.rl.rollout import Rollout, Sampling
from preft_cli.rl.rollouts.api import KEY_VARIABLE, Api
from preft_cli.rl.rollouts.server import ServerRollouts
from preft_cli.rl.rollouts.tokens_route import GENERATE, parameters
from tests.engine.served import Server, metric, wait_until
from tests.reference import MaskedReference, random_adapter
from tests.unit.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
STOPS = [2, *range(100, 124)]
PROMPTS = [[(5 * i + 7 * length) % 320 for i in range(length)] for length in (40, 75, 3)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """Many tokens end an answer, and the model's own settings would draw other tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = tiny_model().config
    config.num_attention_heads, config.head_dim, config.num_key_value_heads = 2, 32, 1
    config.max_position_embeddings = 4096
    # Slow enough that the server keeps up with its engine on a busy machine, and hears of a sync while requests run.
    config.intermediate_size = 1 << 15
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    odd = {"eos_token_id": STOPS, "temperature": 0.1, "top_k": 2, "repetition_penalty": 1.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(odd))
    return BaseModel(str(folder), folder)


@pytest.fixture(scope="module")
def masked(tiny: BaseModel) -> MaskedReference:
    return MaskedReference(tiny.path)


@pytest.fixture(scope="module")
def served(tiny: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """The server and its adapters folder, which is empty."""
    folder = tmp_path_factory.mktemp("rollouts") / "adapters"
    folder.mkdir()
    settings = ["dtype=float32", "max_model_len=2048", "max_num_seqs=16", "gpu_slots=2", "vllm_args.block-size=32"]
    settings += ["vllm_args.logprobs-mode=processed_logprobs", "vllm_args.enable-scale-out=true"]
    settings += ["vllm_args.kv-cache-memory-bytes=134217728"]
    settings = [f"model.base={tiny.path}", *(f"serve.{setting}" for setting in settings)]
    os.environ[KEY_VARIABLE] = "secret"
    server = Server(folder, folder.parent / "log.txt", *settings)
    server.wait_ready()
    yield server, folder
    del os.environ[KEY_VARIABLE]
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0, server.log.read_text()


@pytest.fixture(scope="module")
def two(tiny: BaseModel) -> list[Adapter]:
    """Adapters that have nothing in common."""
    return [
        random_adapter(modules_of(tiny), tiny.fingerprint, seed=seed, rank=4, method="lorap+direftp", loud=3)
        for seed in (1, 2)
    ]


def connect(served: tuple[Server, Path], tiny: BaseModel, in_flight: Any = "finish", **more: Any) -> ServerRollouts:
    at = {"url": f"{served[0].url}/v1", "store": served[1], "adapter_name": "policy", **more}
    return ServerRollouts(
        method="lorap+direftp", base=tiny.fingerprint, trained_in="float32", in_flight=in_flight, **at
    )


def gap(
    masked: MaskedReference, prompt: list[int], answers: list[Rollout], adapter: Adapter | None, sampling: Sampling
) -> float:
    """How far log-probabilities are from those of the distribution that the reference draws from."""
    logprobs = masked.batch_logprobs([(prompt, answer.token_ids) for answer in answers], adapter, True)
    if sampling.top_k:
        kept = logprobs.topk(sampling.top_k, dim=-1)
        logprobs = torch.full_like(logprobs, -torch.inf).scatter(-1, kept.indices, kept.values)
    logprobs = (logprobs / sampling.temperature).log_softmax(-1)
    drawn = torch.tensor([token for answer in answers for token in answer.token_ids])
    found = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    return float((logprobs.gather(-1, drawn[:, None])[:, 0] - found).abs().max())


def test_new_weights_answer_from_no_old_kv_on_a_warm_prefix_cache(
    served: tuple[Server, Path], tiny: BaseModel, masked: MaskedReference, two: list[Adapter]
) -> None:
    rollouts = connect(served, tiny)
    digests = []
    for adapter in two:
        synced = rollouts.sync(adapter.pairs)
        digests.append(synced.digest)
        assert synced.num_bytes >= sum(t.nbytes for pair in adapter.pairs.values() for t in pair.tensors.values())
        assert 0 < synced.seconds < 10
        for sampling in (Sampling(10, 1.0), Sampling(10, 0.6), Sampling(10, 0.6, top_k=5)):
            before = metric(served[0], "vllm:prefix_cache_hits_total")
            groups = rollouts.generate(PROMPTS, 4, sampling, seed=3)
            # All answers share the prompt's whole blocks: at first all but one find them there, then all do.
            first = sampling == Sampling(10, 1.0)
            assert metric(served[0], "vllm:prefix_cache_hits_total") - before == (3 if first else 4) * (32 + 64)
            for prompt, answers in zip(PROMPTS, groups, strict=True):
                assert gap(masked, prompt, answers, adapter, sampling) < TOLERANCE
                assert len({tuple(answer.token_ids) for answer in answers}) > 1
    others = gap(masked, PROMPTS[1], groups[1], two[0], Sampling(10, 1.0))
    assert others > 100 * TOLERANCE
    assert digests == [adapter.digest() for adapter in two]


def test_answers_end_with_their_stop_token_and_are_the_same_for_the_same_seed(
    served: tuple[Server, Path], tiny: BaseModel, masked: MaskedReference, two: list[Adapter]
) -> None:
    rollouts = connect(served, tiny)
    rollouts.sync(two[0].pairs)
    sampling = Sampling(30, 1.0)
    prompts = [PROMPTS[0], PROMPTS[0]]
    first, again, other = (rollouts.generate(prompts, 6, sampling, seed=seed) for seed in (5, 5, 6))
    tokens = [[[answer.token_ids for answer in group] for group in groups] for groups in (first, again, other)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
    assert tokens[0][0] != tokens[0][1]  # equal prompts, other answers
    answers = [answer.token_ids for group in first for answer in group]
    assert {answer[-1] for answer in answers} & set(STOPS)
    for answer in answers:
        assert not set(answer[:-1]) & set(STOPS)
        assert answer[-1] in STOPS or len(answer) == 30
    [base] = rollouts.generate(PROMPTS[:1], 2, sampling, seed=5, adapted=False)
    assert gap(masked, PROMPTS[0], base, None, sampling) < TOLERANCE
    greedy = rollouts.generate(PROMPTS, 2, Sampling(5, 0.0), seed=1)
    for prompt, group in zip(PROMPTS, greedy, strict=True):
        assert group[0].token_ids == group[1].token_ids
        assert gap(masked, prompt, group, two[0], Sampling(5, 1.0)) < TOLERANCE


def start_long(served: tuple[Server, Path], pool: ThreadPoolExecutor, tokens: dict[str, int]) -> list[Future[Any]]:
    """Two answers of each model that end with their length, seen to have begun and not ended."""
    before = metric(served[0], "vllm:prompt_tokens_total")
    started = []
    for model, count in tokens.items():
        sampling = {**parameters(2, Sampling(count, 1.0), 1), "ignore_eos": True}
        body = {"model": model, "token_ids": PROMPTS[0], "sampling_params": sampling}
        started.append(pool.submit(Api(served[0].url).post_all, GENERATE, [body], 120.0))
    begun = before + 2 * len(tokens) * len(PROMPTS[0])
    wait_until(lambda: metric(served[0], "vllm:prompt_tokens_total") == begun)
    assert not any(future.done() for future in started)
    return started


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_requests_in_flight_end_on_the_former_weights_or_are_ended(
    served: tuple[Server, Path], tiny: BaseModel, masked: MaskedReference, two: list[Adapter], in_flight: str
) -> None:
    rollouts = connect(served, tiny, in_flight)
    rollouts.sync(two[0].pairs)
    with ThreadPoolExecutor() as pool:
        tokens = {str(tiny.path): 600, "policy": 600 if in_flight == "finish" else 1900}
        base, former = start_long(served, pool, tokens)
        rollouts.sync(two[1].pairs)
        choices = former.result()[0]["choices"]
        assert {choice["finish_reason"] for choice in base.result()[0]["choices"]} == {"length"}
    answers = [Rollout(c["token_ids"], [one["logprob"] for one in c["logprobs"]["content"]]) for c in choices]
    if in_flight == "finish":
        assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    else:
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        assert all(0 < len(answer.token_ids) < 1900 for answer in answers)
    assert gap(masked, PROMPTS[0], answers, two[0], Sampling(600, 1.0)) < TOLERANCE
    wait_until(lambda: metric(served[0], "vllm:num_requests_running") == 0)  # the engine has let go of them, too
    [now] = rollouts.generate(PROMPTS[:1], 2, Sampling(10, 1.0), seed=1)
    assert gap(masked, PROMPTS[0], now, two[1], Sampling(10, 1.0)) < TOLERANCE


def test_what_the_server_does_not_serve_is_said(
    served: tuple[Server, Path], tiny: BaseModel, two: list[Adapter], tmp_path: Path
) -> None:
    elsewhere = connect(served, tiny, store=tmp_path, adapter_name="polic", sync_timeout_s=0.3)
    with pytest.raises(UserError, match=rf"no adapter 'polic' in {served[1]}\. Did you mean policy\?"):
        elsewhere.sync(two[0].pairs)
    connect(served, tiny).sync(two[1].pairs)
    elsewhere = connect(served, tiny, store=tmp_path, sync_timeout_s=0.3)
    with pytest.raises(
        UserError, match=rf"it serves policy from {served[1]}/policy.preft, digest {two[1].digest()[:12]}"
    ):
        elsewhere.sync(two[0].pairs)
    large = random_adapter(modules_of(tiny), tiny.fingerprint, seed=3, rank=17, method="lorap+direftp")
    with pytest.raises(UserError, match=r"rank 17, this server holds up to 16; raise serve\.max_lora_rank"):
        connect(served, tiny).sync(large.pairs)
    ours = connect(served, tiny)
    ours.sync(two[0].pairs)
    connect(served, tiny).sync(two[1].pairs)
    with pytest.raises(UserError, match="somebody else replaced"):
        ours.generate(PROMPTS[:1], 1, Sampling(1, 1.0), seed=1)


def test_names_and_requests_of_others_are_behind_the_api_key(
    served: tuple[Server, Path], tiny: BaseModel, two: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = connect(served, tiny)
    rollouts.sync(two[0].pairs)
    for path, payload in (("/preft/adapters/policy", None), ("/preft/adapters/policy/abort", {}), (GENERATE, {})):
        with pytest.raises(urllib.error.HTTPError) as caught:
            served[0].get(path, payload)
        assert caught.value.code == 401
    assert served[0].get("/preft/status")["engine"]["logprobs_mode"] == "processed_logprobs"
    rollouts.stop()
    assert not list(served[1].iterdir())
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(UserError, match=f"wants the server's API key: set {KEY_VARIABLE}"):
        connect(served, tiny)
