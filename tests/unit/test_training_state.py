"""What is kept of a run between two calls: a resumed run ends where it ended, and on the rows that it was evaluated on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.training import finish, memory, session
from preft_cli.training.best import Best
from preft_cli.training.output import RunFolder
from preft_cli.training.run import train
from preft_cli.training.sweep.folders import state_of
from preft_cli.training.sweep.grid import Cell
from tests.unit.test_training_keep import EARLY, OTHERS, evaluated
from tests.unit.test_training_run import ROWS, config, logged


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, rows in {"train": ROWS, "heldout": ROWS, "other": ROWS[:3], "validation": OTHERS}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "steps"), [(EARLY, 10), ({"max_steps": 5, "eval_every": 2}, 5)], ids=["stopped early", "last step"]
)
def test_a_run_that_died_before_its_result_trains_no_further(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], steps: int
) -> None:
    whole = train(config(base, train=options | {"output_dir": "whole"}), root)

    def killed(_: Any) -> None:
        raise RuntimeError("killed")

    parts = config(base, train=options | {"output_dir": "parts"})
    with monkeypatch.context() as patch:
        patch.setattr(finish, "finish", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(parts, root)
    newest = root / "parts" / "checkpoints" / f"checkpoint-{steps}"
    assert RunFolder(root / "parts").last_checkpoint() == newest, "or that run would have to be done again"
    resumed = train(parts, root, resume=True)
    same = ("steps", "epochs", "stopped_early", "best_step", "kept_step", "digest", "held_out", "validation", "last")
    assert {name: getattr(resumed, name) for name in same} == {name: getattr(whole, name) for name in same}
    assert resumed.steps == steps
    assert logged(root / "parts") == logged(root / "whole")
    assert evaluated(root / "parts") == evaluated(root / "whole")


def test_the_held_out_rows_may_be_swapped_where_they_choose_nothing(base: Path, root: Path) -> None:
    options = {"max_steps": 4, "eval_every": 2, "validation_file": "validation.jsonl"}
    first = train(config(base, train=options), root)
    other = config(base, train=options, eval={"file": "other.jsonl"})
    cell = Cell("tiny", {}, other)
    assert state_of(cell, root) == "interrupted"
    second = train(other, root, resume=True)
    assert (second.digest, second.steps, second.validation) == (first.digest, 4, first.validation)
    assert (first.held_out.rows, second.held_out.rows) == (12, 3)
    assert second.held_out.base != first.held_out.base
    assert train(other, root, resume=True) == second
    assert state_of(cell, root) == "finished"


def test_the_rows_that_choose_stay(base: Path, root: Path) -> None:
    def choosing(**more: Any) -> PreftConfig:
        return config(base, train={"max_steps": 4, "save_every": 2} | more)

    train(choosing(), root)
    swapped = config(base, train={"max_steps": 4, "save_every": 2}, eval={"file": "other.jsonl"})
    with pytest.raises(UserError, match=r"other settings: eval\.file: heldout\.jsonl -> other\.jsonl\. Set them back"):
        train(swapped, root, resume=True)
    # The same name, other rows.
    (root / "heldout.jsonl").write_text("\n".join(map(json.dumps, ROWS[:3])))
    with pytest.raises(
        UserError, match=r"checkpoint-4 was evaluated on other rows .*eval\.file.*--overwrite"
    ) as caught:
        train(choosing(max_steps=6), root, resume=True)
    assert "damaged" not in str(caught.value)


def test_save_every_counts_where_evaluations_hang_on_it(tmp_path: Path) -> None:
    """By what is recorded alone: nothing is trained."""

    def made(eval_file: str | None = "heldout.jsonl", **options: Any) -> PreftConfig:
        return PreftConfig.model_validate({"train": options, "eval": {"file": eval_file}})

    def finished(before: PreftConfig, now: PreftConfig) -> bool:
        folder = RunFolder(tmp_path / "run")
        folder.prepare(before, resume=True)
        folder.result.write_text("{}")
        return folder.is_finished(now)

    assert not finished(made(save_every=2), made(save_every=3))
    with pytest.raises(UserError, match=r"train\.eval_every \(default: save_every\): 2 -> 3\."):
        RunFolder(tmp_path / "run").check(made(save_every=3), resume=True, overwrite=False)
    RunFolder(tmp_path / "run").check(made(save_every=3, eval_every=2), resume=True, overwrite=False)
    assert finished(made(save_every=2), made(eval_every=2)), "the same evaluations"
    assert finished(made(save_every=2, eval_every=4), made(save_every=3, eval_every=4))
    assert finished(made(None, save_every=2), made(None, save_every=3)), "nothing is evaluated"
    assert finished(made(save_every=2, keep="last"), made(save_every=3, keep="last")), "nothing is decided"
    assert not finished(made(eval_every=2, keep="last", early_stopping=1), made(keep="last", early_stopping=1))
    assert not finished(made(), made(None)), "its held-out loss is not known"


def test_best_of_other_rows(tmp_path: Path) -> None:
    empty = Best("these")
    empty.save(tmp_path)
    Best("others").load(tmp_path)  # nothing was evaluated yet
    empty.offer(2, 1.5, dict)
    empty.offer(4, float("nan"), dict)
    empty.save(tmp_path)
    again = Best("these")
    again.load(tmp_path)
    assert (again.step, again.loss, again.misses, again.last[0]) == (2, 1.5, 1, 4)
    for rows in ("others", None):
        with pytest.raises(UserError, match="evaluated on other rows"):
            Best(rows).load(tmp_path)


def test_a_damaged_result(base: Path, root: Path) -> None:
    short = config(base, train={"max_steps": 1})
    first = train(short, root)
    path = root / "runs" / "tiny" / "result.json"
    for damage in (b'{"steps": 1', b"{}", b"\xff"):
        path.write_bytes(damage)
        with pytest.raises(UserError, match=r"result\.json is damaged; remove it, and --resume makes it anew"):
            train(short, root, resume=True)
    path.unlink()
    assert train(short, root, resume=True).digest == first.digest, "as it said"
    assert path.is_file()


def test_peak_memory_without_a_high_water_mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in gVisor, whose /proc/self/status has no VmHWM."""
    for status in ("Name:\tpython\nVmSize:\t  123 kB\n", None):
        path = tmp_path / f"status-{status is None}"
        if status:
            path.write_text(status)
        monkeypatch.setattr(memory, "STATUS", path)
        assert 10e6 < memory.peak_memory("cpu") < 1e12
    path.write_text("VmPeak:\t 9 kB\nVmHWM:\t  4 kB\n")
    assert memory.peak_memory("cpu") == 4096


def test_each_run_has_its_own_peak_of_gpu_memory(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that remembers the largest run so far, until it is told to forget it."""
    peak = [5 << 30]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 7))
    monkeypatch.setattr(session, "reset_peak_memory", lambda device: memory.reset_peak_memory("cuda"))
    monkeypatch.setattr(finish, "peak_memory", lambda device: memory.peak_memory("cuda"))
    assert train(config(base, train={"max_steps": 1}), root).peak_memory == 7
    peak[0] = 3
    memory.reset_peak_memory("cpu")
    assert peak[0] == 3, "a CPU has no such mark"
