"""`preft train --sweep` on a tiny model: ordinary runs in folders of their own, and what becomes of those that fail or stop."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.data import load
from preft_cli.errors import UserError
from preft_cli.training import session
from preft_cli.training.interrupt import InterruptRequest
from preft_cli.training.run import train
from preft_cli.training.sweep import run, workers
from preft_cli.training.sweep.folders import folder_of, state_of
from preft_cli.training.sweep.grid import Grid, parse_grid
from preft_cli.training.sweep.plan import plan_sweep
from preft_cli.training.sweep.result import SweepResult
from preft_cli.training.sweep.run import run_sweep
from tests.unit.sweeps import never_ready, serve_and_die
from tests.unit.test_training_run import ROWS as TWELVE
from tests.unit.test_training_run import stop_after

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = TWELVE[:8]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train", "validation", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def config(base: Path, **train_section: Any) -> PreftConfig:
    common = {"max_steps": 3, "dtype": "float32", "learning_rate": 0.01, "validation_file": "validation.jsonl"}
    return PreftConfig.model_validate(
        {
            "model": {"base": str(base)},
            "adapter": {"name": "tiny", "rank": 4},
            "train": common | train_section,
            "eval": {"file": "heldout.jsonl"},
        }
    )


def grid(base: Path, *sweeps: str, choose: tuple[str, ...] = (), **train_section: Any) -> Grid:
    return parse_grid(list(sweeps), list(choose), config(base, **train_section))


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **rest: (calls.append(args), original(*args, **rest))[1])
    return calls


def test_a_sweep_its_failures_and_its_resume(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = grid(base, "adapter.method=direftp", "train.learning_rate=1e30,0.01", choose=("train.learning_rate",))
    read = counted(monkeypatch, load, "read_data")
    loaded = counted(monkeypatch, session, "load_base")
    result = run_sweep(made, root, command="preft train --sweep ...")
    assert (len(read), len(loaded)) == (3, 2), "each file is read once for all runs"
    diverged, good = result.cells
    assert "training stopped: the loss is not a finite number" in str(diverged.error)
    assert (good.error, result.complete) == (None, True)
    assert [point.chosen for point in result.points] == [{"train.learning_rate": 0.01}]
    assert SweepResult.model_validate_json((root / "runs/tiny/sweep.json").read_text()) == result
    assert (root / "runs/tiny" / good.name / "adapter").is_dir()

    alone = train(made.cells[1].config.model_copy(update={"train": config(base, output_dir="alone").train}), root)
    assert (good.held_out, good.validation) == (alone.held_out, alone.validation), "as without a sweep"

    with pytest.raises(UserError, match=r"holds a sweep already \(2 of the 2 runs, such as method=direftp.*--resume"):
        run_sweep(made, root)
    loaded.clear()
    sweeps = ("adapter.method=direftp,lora", "train.learning_rate=0.01")
    more = grid(base, *sweeps)
    capsys.readouterr()
    resumed = run_sweep(more, root, resume=True)
    assert len(loaded) == 1, "finished runs are kept"
    assert "1 of 2 runs are finished already" in capsys.readouterr().err
    assert resumed.cells[0] == good
    with pytest.raises(UserError, match=r"train\.batch_size: 4 -> 2[^\n]*\nThe same goes for 1 more"):
        run_sweep(grid(base, *sweeps, batch_size=2), root, resume=True)

    monkeypatch.setattr(session, "load_base", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(more, root, overwrite=True)
    assert {state_of(cell, root) for cell in more.cells} == {"new"}, "or --resume would mix two sweeps"
    assert not (root / "runs/tiny/sweep.json").exists()


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("runs/tiny/rank=4/thesis.doc", {}, "holds a sweep already"),
        ("runs/tiny/rank=4/thesis.doc", {"resume": True}, "holds files but no run of preft train"),
        ("runs/tiny/rank=4/thesis.doc", {"overwrite": True}, "holds files but no run of preft train"),
        ("runs/tiny/sweep.json", {}, r"holds a sweep already \(sweep.json\)"),
        ("runs/tiny/preft.resolved.yaml", {"overwrite": True}, "holds a single run of preft train"),
        ("runs/tiny", {}, "tiny is a file; name a folder"),
    ],
)
def test_folders_that_are_left_alone(base: Path, root: Path, path: str, options: dict[str, bool], said: str) -> None:
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text("mine")
    with pytest.raises(UserError, match=said):
        run_sweep(grid(base, "adapter.rank=2,4"), root, **options)  # type: ignore[arg-type]
    assert (root / path).read_text() == "mine"
    assert [file for file in root.rglob("*") if file.name == "metrics.jsonl"] == []


def test_nothing_runs_if_one_cell_cannot(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_base", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(UserError) as refused:
        run_sweep(grid(base, "adapter.target_modules=all-linear,[q_prj]", "adapter.rank=2,4"), root)
    assert str(refused.value).startswith(
        "target_modules=q_prj,rank=2: adapter.target_modules: 'q_prj' matches no linear"
    )
    assert "rank=4" not in str(refused.value), "told once"
    assert refused.value.exit_code == 2
    with pytest.raises(UserError, match=r"file=gone\.jsonl: train\.file: .*gone\.jsonl does not exist"):
        run_sweep(grid(base, "train.file=train.jsonl,gone.jsonl"), root)
    assert not (root / "runs").exists()


def test_the_plan(base: Path, root: Path) -> None:
    made = grid(base, "adapter.rank=2,4", "train.max_steps=null,2")
    folder = folder_of(made.cells[1], root)
    folder.path.mkdir(parents=True)
    (folder.path / "notes.txt").write_text("")
    plan = plan_sweep(made, root, resume=True, overwrite=False, jobs=2)
    assert [(cell.name, cell.steps, cell.state) for cell in plan.cells][:2] == [
        ("rank=2,max_steps=null", 2, "new"),
        ("rank=2,max_steps=2", 2, "interrupted"),
    ]
    assert (plan.jobs, plan.first.rows) == (2, 8)
    assert [problem for problem in plan.problems if "holds files but no run" in problem]
    assert plan_sweep(grid(base, "adapter.rank=3"), root, resume=True, overwrite=False, jobs=1).problems == []
    batches = plan_sweep(grid(base, "train.batch_size=2,8", max_steps=None), root, resume=True, overwrite=False, jobs=1)
    assert [cell.steps for cell in batches.cells] == [4, 1]
    [problem] = plan_sweep(grid(base, "train.parallel=ddp,fsdp"), root, resume=True, overwrite=False, jobs=1).problems
    assert problem.startswith("parallel=fsdp: train.parallel: fsdp")


def test_processes_in_processes_are_refused(base: Path, root: Path) -> None:
    made = grid(base, "adapter.rank=2,4", num_processes=2)
    with pytest.raises(UserError, match=r"--jobs runs cells side by side"):
        run_sweep(made, root, jobs=2)
    [problem] = plan_sweep(made, root, resume=False, overwrite=False, jobs=2).problems
    assert "train.num_processes" in problem


def test_ctrl_c_keeps_a_checkpoint_and_what_is_done(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = grid(base, "train.max_steps=1,4")
    stop_after(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(UserError, match=r"stopped; 1 of 2 runs are done.*--resume goes on"):
        run_sweep(made, root)
    assert [state_of(cell, root) for cell in made.cells] == ["finished", "interrupted"]
    summary = SweepResult.model_validate_json((root / "runs/tiny/sweep.json").read_text())
    assert (len(summary.cells), summary.complete) == (1, False)
    monkeypatch.undo()
    assert run_sweep(made, root, resume=True).complete
    assert "resuming from" in capsys.readouterr().err


def left_over() -> list[Any]:
    """Processes of a sweep; an engine that other tests share may be alive."""
    return [process for process in multiprocessing.active_children() if process.name != "EngineCore"]


def test_processes_that_die(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_serve", serve_and_die)
    made = grid(base, "train.max_steps=1,2,3,4")
    with InterruptRequest() as stop:
        results = list(workers.run_in_processes(made.cells, root, [{}], stop, resume=False))
        assert [(cell.name, cell.error) for cell in results] == [
            ("max_steps=1", "done before the end"),
            ("max_steps=2", "its process was killed by SIGKILL; if the machine ran out of memory, lower --jobs"),
            ("max_steps=3", "done before the end"),
            ("max_steps=4", "its process ended with exit code 7; train.log in its folder may tell why"),
        ]
        monkeypatch.setattr(workers, "_serve", never_ready)
        assert list(workers.run_in_processes(made.cells, root, [{}, {}], stop, resume=False)) == []
    monkeypatch.setattr(run, "_gpus", list)
    with pytest.raises(UserError, match="no worker process could be started"):
        list(run._run_side_by_side(made.cells, root, 2, resume=False))
    assert left_over() == []


def test_a_process_does_its_run_and_stops_when_asked(base: Path, root: Path) -> None:
    made = grid(base, "train.max_steps=2,100000")
    stop = InterruptRequest()

    def stop_after_a_step() -> None:
        metrics = folder_of(made.cells[1], root).metrics
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not (metrics.is_file() and '"kind": "train"' in metrics.read_text()):
            time.sleep(0.05)
        stop.requested = True

    thread = threading.Thread(target=stop_after_a_step, daemon=True)
    thread.start()
    [result] = workers.run_in_processes(made.cells, root, [{"OMP_NUM_THREADS": "1"}], stop, resume=False)
    thread.join()
    assert (result.name, result.error) == ("max_steps=2", None)
    assert result.held_out is not None
    assert "training: done, 2/2 steps" in folder_of(made.cells[0], root).log.read_text()
    assert folder_of(made.cells[1], root).last_checkpoint() is not None
    assert left_over() == []
