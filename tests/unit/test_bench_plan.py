"""What a benchmark will do: arms that share everything but their adapters, and requests that no cache can help with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preft_cli.bench import plan as planning
from preft_cli.bench.arms import ARMS, adapter_args, ordered, variants
from preft_cli.bench.device import resolve_dtype
from preft_cli.bench.plan import BenchPlan, plan_bench
from preft_cli.bench.workload import distinct_prompts, failure, make_workload
from preft_cli.config.schema import BenchConfig, PreftConfig
from preft_cli.errors import UserError

VOCAB = 1000


def config(**bench: Any) -> PreftConfig:
    sizes = {"num_requests": 6, "num_adapters": 4, "prompt_len": 5, "output_len": 8, "repeats": 2, "max_num_seqs": 4}
    return PreftConfig.model_validate({"project": {"seed": 7}, "bench": {**sizes, **bench}})


def plan(**bench: Any) -> BenchPlan:
    return plan_bench(config(**bench), Path())


def test_arms_share_all_engine_arguments_but_those_of_adapters() -> None:
    base, lora, lorap = plan().arms
    assert {**base.engine_args, **adapter_args(ARMS["lora"], config().bench)} == lora.engine_args
    # The stock engine counts adapters in host memory; the plugin's worker sizes its pool by their files.
    assert {k: v for k, v in lora.engine_args.items() if k != "max_cpu_loras"} == lorap.engine_args
    assert base.engine_args["enable_prefix_caching"] is False
    assert base.engine_args["seed"] == 7


def test_only_preft_runs_with_the_plugin() -> None:
    assert {arm.arm: arm.environment["PREFT_DISABLE"] for arm in plan().arms} == {
        "base": "1",
        "lora": "1",
        "lorap": None,
    }


def test_base_is_always_there() -> None:
    assert ordered(["lorap"]) == ["base", "lorap"]
    assert ordered(["lora", "base"]) == ["base", "lora"]
    assert any("arm base added" in note for note in plan(arms=["lorap"]).notes)


@pytest.mark.parametrize("arms", [["lora", "lora"], ["base", "lorra"]])
def test_wrong_arms_are_refused(arms: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        ordered(arms)
    assert refused.value.exit_code == 2


def test_slots_are_no_more_than_adapters_and_ranks_round_up() -> None:
    args = adapter_args(ARMS["lora"], BenchConfig(num_adapters=3, gpu_slots=8, rank=12))
    assert (args["max_loras"], args["max_cpu_loras"], args["max_lora_rank"]) == (3, 3, 16)
    assert adapter_args(ARMS["lora"], BenchConfig(num_adapters=100, gpu_slots=8))["max_cpu_loras"] == 100


def test_cpu_runs_eagerly_in_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, eager in (("cpu", True), ("gpu", None)):
        monkeypatch.setattr(planning, "find_device", lambda device=device: device)
        assert {arm.engine_args.get("enforce_eager") for arm in plan().arms} == {eager}


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("flags : fpu avx2", "float32"), ("flags : fpu amx_bf16", "auto"), ("Features : fp bf16", "auto")],
)
def test_auto_is_float32_on_a_cpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: flags)
    assert resolve_dtype("auto", "cpu") == dtype
    assert resolve_dtype("auto", "gpu") == "auto"
    assert resolve_dtype("bfloat16", "cpu") == "bfloat16"


def test_random_weights_are_loaded_as_such_and_noted() -> None:
    made = plan_bench(PreftConfig.model_validate({"model": {"base": "random:llama-3.1-8b"}}), Path())
    assert made.random_weights
    assert {arm.engine_args["load_format"] for arm in made.arms} == {"dummy"}
    assert any("random weights" in note for note in made.notes)


def test_the_plan_needs_the_core_install_only() -> None:
    code = "import sys, preft_cli.bench.plan; print({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_seed_decides_the_workload() -> None:
    one, again = make_workload(plan(), VOCAB), make_workload(plan(), VOCAB)
    other = make_workload(plan().model_copy(update={"seed": 8}), VOCAB)
    assert one.digest() == again.digest()
    assert one.digest() != other.digest()


def test_no_prompt_and_no_first_token_occurs_twice() -> None:
    made = make_workload(plan(), VOCAB)
    everything = [*made.warmup, *(request for repetition in made.repetitions for request in repetition)]
    assert len(everything) == 6 + 2 * 6 - 2  # the warm-up is as long as max_num_seqs or num_adapters: 4
    firsts = [request.prompt_token_ids[0] for request in everything]
    assert len(set(firsts)) == len(firsts)
    assert {len(request.prompt_token_ids) for request in everything} == {5}


def test_adapters_take_turns_and_the_warm_up_touches_all() -> None:
    made = make_workload(plan(num_adapters=4, num_requests=6), VOCAB)
    assert [[request.adapter for request in repetition] for repetition in made.repetitions] == [[0, 1, 2, 3, 0, 1]] * 2
    many = make_workload(plan(num_adapters=9, num_requests=2), VOCAB)
    assert {request.adapter for request in many.warmup} == set(range(9))


def test_prompts_differ_even_when_first_tokens_cannot() -> None:
    import random

    prompts = distinct_prompts(random.Random(0), [4, 5] * 50, vocab_size=4)
    assert len({tuple(prompt) for prompt in prompts}) == 100
    assert [len(prompt) for prompt in prompts] == [4, 5] * 50
    with pytest.raises(UserError, match="prompt_len"):
        distinct_prompts(random.Random(0), [2] * 17, vocab_size=4)


def test_a_short_or_stopped_answer_is_a_failure() -> None:
    request = make_workload(plan(output_len=8), VOCAB).repetitions[0][0]
    assert failure(request, 8, "length") is None
    assert failure(request, 7, "length") is not None
    assert failure(request, 8, "stop") is not None
    assert "3 of 8" in str(failure(request, 3, "abort"))


def test_lengths_are_drawn_evenly_and_alike_in_all_repetitions() -> None:
    made = make_workload(plan(prompt_len=[2, 9], output_len=[3, 5], num_requests=200), VOCAB)
    shapes = [[(len(one.prompt_token_ids), one.output_len) for one in repetition] for repetition in made.repetitions]
    assert shapes[0] == shapes[1]
    assert {prompt for prompt, _ in shapes[0]} == set(range(2, 10))
    assert {output for _, output in shapes[0]} == {3, 4, 5}
    assert made.longest == (9, 5)


def test_zipf_asks_for_few_adapters_most_of_the_time() -> None:
    asked = {choice: adapters(choice) for choice in ("zipf", "uniform")}
    assert asked["zipf"].count(0) > 4 * asked["uniform"].count(0)
    assert len(set(asked["uniform"])) == 50
    steep = adapters("zipf", zipf_exponent=3.0)
    assert steep.count(0) > asked["zipf"].count(0)


def adapters(choice: str, **bench: Any) -> list[int]:
    made = make_workload(plan(adapter_choice=choice, num_adapters=50, num_requests=600, **bench), 10_000)
    return [request.adapter for request in made.repetitions[0]]


def test_given_prompts_are_used_in_turn() -> None:
    made = make_workload(plan(), VOCAB, prompts=[[1, 2], [3]])
    given = [one.prompt_token_ids for one in (*made.warmup, *made.repetitions[0])]
    assert given[:4] == [[1, 2], [3], [1, 2], [3]]
    assert made.longest == (2, 8)


def test_multi_lora_is_tried_with_both_kinds_of_graphs_on_a_gpu() -> None:
    assert list(variants("lora", "cpu", BenchConfig())) == [None]
    assert list(variants("lora", "gpu", BenchConfig())) == ["specialised graphs", "shared graphs"]
    assert list(variants("lora", "gpu", BenchConfig(lora_graphs="shared"))) == ["shared graphs"]
    assert list(variants("lorap", "gpu", BenchConfig())) == [None]


def test_arms_that_adapt_all_tokens_have_the_slots_of_multi_lora() -> None:
    sizes = BenchConfig(num_adapters=100, gpu_slots=8)
    assert [adapter_args(ARMS[arm], sizes)["max_loras"] for arm in ("lora", "direft", "lorap", "direftp")] == [
        *(100, 100),
        *(8, 8),
    ]
    assert adapter_args(ARMS["lora"], BenchConfig(num_adapters=100, lora_slots=16))["max_loras"] == 16
