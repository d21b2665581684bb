"""The smallest real benchmark: three arms on a tiny model, each in its own engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from preft_cli.bench.results import BenchResult
from preft_cli.bench.run import bench
from preft_cli.config.schema import PreftConfig

pytestmark = pytest.mark.engine

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("bench")
    LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS)).to(torch.bfloat16).save_pretrained(root / "tiny")
    sizes = {"num_requests": 6, "num_adapters": 3, "gpu_slots": 2, "max_num_seqs": 4, "repeats": 2}
    lengths = {"prompt_len": 40, "output_len": 8}
    return bench(PreftConfig.model_validate({"model": {"base": "tiny"}, "bench": {**sizes, **lengths}}), root)


def test_all_arms_answer_all_requests(result: BenchResult) -> None:
    assert list(result.arms) == ["base", "lora", "lorap"]
    assert result.failures == 0
    for arm in result.arms.values():
        assert [(r.requests, r.tokens_asked, r.tokens_produced) for r in arm.repetitions] == [(6, 48, 48)] * 2


def test_ratios_are_there_and_of_a_believable_size(result: BenchResult) -> None:
    assert {"lora/base", "lorap/base", "lorap/lora"} <= result.ratios.keys()
    assert all(0.01 < ratio.low <= ratio.median <= ratio.high < 100 for ratio in result.ratios.values())


def test_only_the_preft_arm_is_patched(result: BenchResult) -> None:
    assert {name: [status["live"] for status in arm.patch] for name, arm in result.arms.items()} == {
        "base": [],
        "lora": [],
        "lorap": [True, True],  # engine core and worker
    }
    assert {name: arm.engine["lora"] is not None for name, arm in result.arms.items()} == {
        "base": False,
        "lora": True,
        "lorap": True,
    }


def test_no_arm_has_a_prefix_cache(result: BenchResult) -> None:
    assert {arm.engine["enable_prefix_caching"] for arm in result.arms.values()} == {False}


def test_the_file_reads_back(result: BenchResult) -> None:
    assert result.path is not None
    assert BenchResult.model_validate_json(result.path.read_text()).ratios == result.ratios


def test_the_stock_arms_say_that_the_plugin_is_off(result: BenchResult) -> None:
    assert result.path is not None
    logs: dict[str, str] = {name: Path(result.path.parent / arm.log).read_text() for name, arm in result.arms.items()}
    assert {name: "PREFT_DISABLE is set" in log for name, log in logs.items()} == {
        "base": True,
        "lora": True,
        "lorap": False,
    }
