"""Presets: over the file, under `--set`, and valid by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from preft_cli.bench.presets import PRESETS, overrides
from preft_cli.commands.options import load_config
from preft_cli.config.load import load, load_defaults
from preft_cli.config.overrides import Override
from preft_cli.config.problems import ConfigErrors
from preft_cli.errors import UserError
from preft_cli.models import RANDOM_SHAPES


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_config(name: str, tmp_path: Path) -> None:
    config = load_defaults(tmp_path, overrides(name)).config
    assert "base" in config.bench.arms
    assert config.bench.num_requests >= config.bench.num_adapters
    shape = config.model.base.removeprefix("random:")
    assert config.model.base == "smollm2-135m" or shape in RANDOM_SHAPES


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_file_does_not_bend_a_preset(name: str, tmp_path: Path) -> None:
    path = tmp_path / "preft.yaml"
    path.write_text(
        "model: {base: elsewhere}\n"
        "serve: {tensor_parallel_size: 8, gpu_memory_utilization: 0.3}\n"
        "bench: {mode: online, arms: [base], num_adapters: 3, adapter_choice: uniform, rank: [3, 5], num_requests: 7,"
        " prompt_len: [2, 3], output_len: 5, prompts: p.jsonl, max_num_seqs: 3, gpu_slots: 1, lora_slots: 2,"
        " lora_graphs: shared, repeats: 1, engines: 2, enable_prefix_caching: true, dtype: float16}\n"
    )
    bent, straight = load(path, overrides(name)).config, load_defaults(tmp_path, overrides(name)).config
    assert (bent.bench, bent.model, bent.serve) == (straight.bench, straight.model, straight.serve)


def test_the_file_then_the_preset_then_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("preft.yaml").write_text("project: {seed: 7, name: mine}\nbench: {rank: 3, num_adapters: 3}\n")
    config = load_config(None, ["bench.num_adapters=9"], preset=overrides("ci")).config
    assert (config.project.name, config.project.seed) == ("mine", 0)
    assert (config.bench.rank, config.bench.num_adapters) == (8, 9)
    assert load_config(None, None).config.bench.rank == 3


def test_errors_name_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "preft.yaml"
    path.write_text("bench: {rank: 3}\n")
    bad = Override(("bench", "gpu_slots"), 0, "--preset ci")
    with pytest.raises(ConfigErrors, match=r"^--preset ci: bench\.gpu_slots: must be more than 0, found 0$"):
        load(path, [bad])
    path.write_text("bench: 3\n")  # what the preset would lay its keys over
    with pytest.raises(ConfigErrors, match=r"--preset ci: bench holds a single value"):
        load(path, overrides("ci"))


def test_an_unknown_preset() -> None:
    with pytest.raises(UserError, match=r"--preset paper8b: .*did you mean paper-8b\?") as refused:
        overrides("paper8b")
    assert refused.value.exit_code == 2
    assert all(f"\n  {name} " in str(refused.value) for name in PRESETS)
    assert overrides(None) == []
