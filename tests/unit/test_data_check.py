"""`preft data check`: what it counts, what it shows, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from preft_cli.config.schema import PreftConfig
from preft_cli.data import Row
from preft_cli.data.check import DataCheck, check
from preft_cli.data.check.count import find_leaks
from preft_cli.data.check.show import adapted_positions
from preft_cli.data.tokenise import TokenisedRows
from preft_cli.errors import UserError
from preft_cli.training.collate import Collator
from tests.unit.conftest import Run
from tests.unit.tiny import save_tiny


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


TRAIN = [
    chat("foo", "bar", "more", "baz"),
    chat("foo", "bar"),
    chat("foo", "other"),
    chat("q " * 300, "too long"),
    {"prompt": "foo ba", "completion": "r"},
]
HELD_OUT = [chat("foo", "other"), chat("foo", "hello"), chat("hello", "world")]


@pytest.fixture
def project(tmp_path: Path) -> tuple[PreftConfig, Path]:
    for name, records in (("train", TRAIN), ("heldout", HELD_OUT)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    base = str(save_tiny(tmp_path / "model"))
    config = {"model": {"base": base}, "train": {"max_length": 200}, "eval": {"file": "heldout.jsonl"}}
    (tmp_path / "preft.yaml").write_text(json.dumps(config))
    return PreftConfig.model_validate(config), tmp_path


def test_counts_lengths_drops_repeats_and_leaks(project: tuple[PreftConfig, Path]) -> None:
    config, root = project
    found = check(config, root, 0)
    train, held_out = found.files
    assert (train.setting, train.conversations, train.rows) == ("train.file", 5, 5)
    (long,) = train.dropped
    assert long.where == f"{root / 'train.jsonl'}:4"
    assert "tokens, longer than train.max_length or the model's 200" in long.reason
    assert [(same.where[-1], same.of[-1]) for same in train.duplicates] == [("2", "1")]
    assert (train.prompts, train.sharing_prompt) == (3, 3 / 5)
    assert sum(bin_.rows for bin_ in train.histogram) == 5
    assert train.prompt.max > train.prompt.median
    assert (held_out.rows, held_out.duplicates, held_out.sharing_prompt) == (3, [], 2 / 3)
    (leak,) = found.leaks
    assert (leak.held_out, leak.seen_in, leak.prompts) == ("eval.file", "train.file", 2)
    assert [(same.where[-1], same.of[-1]) for same in leak.rows] == [("1", "3")]


def test_problems_have_no_answers_to_look_at(project: tuple[PreftConfig, Path]) -> None:
    config, root = project
    with pytest.raises(UserError, match="preft train --dry-run"):
        check(PreftConfig.model_validate({**config.model_dump(), "train": {"task": "grpo"}}), root, 0)


def test_lengths_are_percentiles_of_what_is_there() -> None:
    from preft_cli.data.check.count import count_file

    rows = [Row([0] * length, [1] * 2, f"f:{length}") for length in range(1, 101)]
    found = count_file("train.file", "f", [], TokenisedRows(rows, 0), 500)
    assert found.prompt.model_dump() == {"median": 50, "p95": 95, "max": 100}
    assert found.completion.model_dump() == {"median": 2, "p95": 2, "max": 2}
    assert [(b.up_to, b.rows) for b in found.histogram] == [(4, 2), (8, 4), (16, 8), (32, 16), (64, 32), (128, 38)]


def test_the_same_ids_at_another_boundary_are_another_row() -> None:
    files = {"a": TokenisedRows([Row([1, 2], [3], "a")], 0), "b": TokenisedRows([Row([1], [2, 3], "b")], 0)}
    assert find_leaks(files) == []


@pytest.mark.parametrize("method", ["lorap", "direftp", "lorap+direftp"])
def test_the_mask_shown_is_the_one_of_training(method: str) -> None:
    rows = [Row([5, 2, 2, 7], [7, 5, 2]), Row([9], [2])]
    batch = Collator()(rows)["prompt_mask"].tolist()
    for row, mask in zip(rows, batch, strict=True):
        assert adapted_positions(method, len(row.prompt_ids), len(row)) == mask[: len(row)]
        assert adapted_positions(method.replace("p", ""), len(row.prompt_ids), len(row)) == [True] * len(row)


def test_for_people_without_colour_every_stretch_is_named(project: Any, run: Run) -> None:
    code, out, _ = run("data", "check", "--rows", "0")
    assert code == 0
    assert "train.jsonl:1, as lorap sees it:\n  positions 0 to " in out
    prompt, completion = (line.strip() for line in out.splitlines() if line.startswith("    ") and "·" in line)
    assert prompt.startswith("<|im_start|>·user·\\n·foo·<|im_end|>·")
    assert completion.replace("·", "") == "bar<|im_end|>"
    assert ": prompt, adapted\n" in out
    assert ": completion, learnt, masked: base weights alone\n" in out
    assert "eval.file: 1 rows are in train.file too" in out
    assert "train.file: 1 of 6 rows are longer than 200 tokens and were dropped" in out
    assert "prompt ids were not compared with the server's: --rows 0" in out
    assert "\x1b" not in out


def test_in_colour_prompt_and_completion_differ(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from preft_cli.data.check import report

    console = Console(force_terminal=True, color_system="standard", width=200, record=True)
    monkeypatch.setattr(report, "out", console)
    with console.capture() as captured:
        report.print_check(check(*project, 0))
    prompt, completion = (line for line in captured.get().splitlines() if line.startswith("    \x1b"))
    assert "\x1b[30;46m" in prompt
    assert "\x1b[30;42m" in completion
    assert "\x1b[30;42m" not in prompt


def test_ids_beside_the_servers_and_exit_code_1_if_they_differ(
    project: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    code, out, _ = run("data", "check", "--json", "--rows", "4")
    found = DataCheck.model_validate_json(out)
    assert code == 0
    # The long one is not trained on, and the server would refuse it.
    assert [row.where.rpartition(":")[2] for row in found.server.rows] == ["1", "1", "2", "3"]
    assert found.server.equal
    assert all(row.ids == row.server_ids for row in found.server.rows)

    from preft_cli.data import tokenise

    upstream = tokenise.render
    monkeypatch.setattr(tokenise, "render", lambda *a, **k: upstream(*a, **k) + " ")
    code, out, _ = run("data", "check", "--rows", "1")
    assert code == 1
    assert "OTHERS ON THE SERVER" in out
    assert "do not train on this" in out


def test_without_vllm_it_says_that_nothing_was_compared(
    project: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preft_cli.data.check import run as module

    monkeypatch.setattr(module, "has_module", lambda name: name != "vllm")
    code, out, _ = run("data", "check")
    assert code == 0
    assert "prompt ids were not compared with the server's: vLLM is not installed here" in out


def test_what_training_refuses_is_refused(project: Any, run: Run) -> None:
    _, root = project
    (root / "train.jsonl").write_text('{"text": "x"}\n{"prompt": "x"}')
    code, out, err = run("data", "check")
    assert (code, out) == (1, "")
    assert "train.jsonl:1: found plain text" in err
    assert "train.jsonl:2: found the key" in err
    assert run("data", "check", "--set", "train.fil=x")[0] == 2
    assert run("data", "check", "--rows", "-1")[0] == 2


def test_another_row_is_shown(project: Any, run: Run) -> None:
    code, out, _ = run("data", "check", "--rows", "0", "--row", "5")
    assert (code, "train.jsonl:5, as lorap sees it" in out) == (0, True)
    code, _, err = run("data", "check", "--rows", "0", "--row", "6")
    assert (code, err.splitlines()[-1]) == (2, "error: --row 6: train.file has 5 rows to show")
