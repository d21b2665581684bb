"""`preft train --sweep` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.training.sweep.grid import Grid
from preft_cli.training.sweep.result import SweepResult
from tests.unit.conftest import Run
from tests.unit.sweeps import results, swept

YAML = "train: {validation_file: validation.jsonl}\neval: {file: heldout.jsonl}\n"


@pytest.fixture
def seen(fake: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What reaches the sweep; the runs with rank 16 fail."""
    seen: dict[str, Any] = {}

    def run_sweep(grid: Grid, root: Path, **options: Any) -> SweepResult:
        seen.update(grid=grid, root=root, **options)
        print("a library that talks on stdout")
        (root / "runs" / "my-adapter").mkdir(parents=True, exist_ok=True)
        return swept(grid, results(grid, lambda cell: None if cell.config.adapter.rank == 16 else (2, 3)))

    fake("preft_cli.training.sweep.run", run_sweep=run_sweep)
    return seen


def test_table_picture_and_exit_code(run: Run, seen: dict[str, Any]) -> None:
    Path("preft.yaml").write_text(YAML)
    code, out, err = run(
        "train", "--sweep", "adapter.rank=4,8", "--sweep", "project.seed=0,1", "--jobs", "3", "--resume"
    )
    assert code == 0
    assert "3.000 (3.000-3.000)" in out
    assert "picture:" in err
    assert (len(seen["grid"].cells), seen["jobs"], seen["resume"], seen["overwrite"]) == (4, 3, True, False)
    assert Path("runs/my-adapter/sweep.png").is_file()
    arguments = ["--sweep", "adapter.rank=8,16", "--choose", "adapter.rank", "--json", "--out", "other/ranks.json"]
    code, out, err = run("train", *arguments)
    assert code == 1, "a run has failed"
    assert json.loads(out)["points"][0]["chosen"] == {"adapter.rank": 8}
    assert {path.name for path in Path("other").iterdir()} == {"ranks.json", "ranks.csv", "ranks.png"}
    assert json.loads(Path("other/ranks.json").read_text()) == json.loads(out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--choose", "adapter.rank"], "--choose is an option of a sweep: give --sweep too"),
        (["--jobs", "2"], "--jobs is an option of a sweep"),
        (["--out", "x.json"], "--out is an option of a sweep"),
        (["--sweep", "adapter.rank=8", "--out", "x.png"], "expected the name of a .json file"),
        (["--sweep", "adapter.rank=8", "--out", "preft.yaml/x.json"], "cannot be written"),
        (["--sweep", "adapter.rank=8", "--jobs", "0"], "--jobs"),
        (["--sweep", "adapter.rank=8", "--resume", "--overwrite"], "give one of them"),
        (["--sweep", "adapter.rnak=8"], "--sweep adapter.rnak=8: adapter.rnak: unknown key (did you mean rank?)"),
        (["--sweep", "adapter.rank=8", "--choose", "train.epochs"], "is not swept; swept are: adapter.rank"),
    ],
)
def test_bad_usage(run: Run, seen: dict[str, Any], arguments: list[str], said: str) -> None:
    Path("preft.yaml").write_text(YAML)
    code, out, err = run("train", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not seen


def test_each_of_several_processes_would_run_the_grid(
    run: Run, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("preft.yaml").write_text(YAML)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    code, out, err = run("train", "--sweep", "adapter.rank=4,8")
    assert (code, out) == (2, "")
    assert "set train.num_processes" in err
    assert not seen


def test_dry_run(run: Run, seen: dict[str, Any]) -> None:
    Path("preft.yaml").write_text(YAML)
    row = json.dumps({"prompt": "a", "completion": "b"})
    for name in ("train", "validation", "heldout"):
        Path(f"{name}.jsonl").write_text(row)
    code, out, _ = run("train", "--sweep", "adapter.rank=4,8", "--dry-run")
    assert code == 0
    assert [(cell["name"], cell["state"], cell["steps"]) for cell in json.loads(out)["cells"]] == [
        ("rank=4", "new", 1), ("rank=8", "new", 1),
    ]  # fmt: skip
    Path("train.jsonl").unlink()
    code, out, _ = run("train", "--sweep", "adapter.rank=4,8", "--dry-run")
    assert code == 2
    assert "train.jsonl does not exist" in json.loads(out)["problems"][0]
    assert not seen
