"""`preft bench` and `preft bench compare` on the command line: options, exit codes, one JSON document on stdout."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preft_cli.bench.results import BenchResult
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from tests.unit.bench_results import make_result
from tests.unit.conftest import Run

SPEEDS = {"base": [10.0, 10, 10], "lora": [4.0, 4, 4], "lorap": [8.0, 8, 8]}


class FakeBench:
    """Stands in for `preft_cli.bench.run.bench`."""

    def __init__(self) -> None:
        self.seen: list[tuple[PreftConfig, Path, Path | None, bool, str | None]] = []
        self.failures = 0
        self.refuses: int | None = None
        self.instead: Callable[[], None] = lambda: None

    def __call__(
        self,
        config: PreftConfig,
        root: Path,
        out: Path | None = None,
        *,
        resume: bool = False,
        preset: str | None = None,
    ) -> BenchResult:
        self.seen.append((config, root, out, resume, preset))
        print("an engine that talks on stdout")
        self.instead()
        if config.bench.num_adapters == self.refuses:
            raise UserError("does not fit")
        return make_result(SPEEDS, path=out or root / "r.json", config=config, failures=self.failures)


@pytest.fixture
def bench(fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    monkeypatch.setattr("preft_cli.doctor.facts.has_module", lambda _: True)
    stand_in = FakeBench()
    fake("preft_cli.bench.run", bench=stand_in)
    fake("preft_cli.bench.report", print_result=lambda result: print("table of", result.path.name))
    return stand_in


@pytest.mark.parametrize(
    ("failures", "conditions", "code", "said"),
    [
        (0, [], 0, []),
        (0, ["lorap/base<0.7", "failures>0"], 0, []),
        (
            0,
            ["lorap/base<0.9", "lora/base<0.5"],
            3,
            ["lorap/base is 0.8 (0.8 to 0.8), which meets", "lora/base is 0.4"],
        ),
        (2, [], 1, []),
        (
            2,
            ["lorap/base<0.9", "failures>0"],
            1,
            ["lorap/base is 0.8", "failures is 2, which meets --fail-on failures>0"],
        ),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_codes(
    run: Run,
    bench: FakeBench,
    failures: int,
    conditions: list[str],
    code: int,
    said: list[str],
    as_json: bool,
) -> None:
    bench.failures = failures
    options = [word for condition in conditions for word in ("--fail-on", condition)]
    found, out, err = run("bench", *options, *(["--json"] if as_json else []))
    assert found == code
    assert all(f"error: {sentence}" in err for sentence in said)
    assert err.count("error: ") == len(said)
    if as_json:
        assert json.loads(out)["failures"] == failures
        assert "an engine that talks" in err
    else:
        assert out.endswith("table of r.json\n")


def test_options_reach_the_benchmark(run: Run, bench: FakeBench, tmp_path: Path) -> None:
    Path("preft.yaml").write_text("bench: {rank: 3, repeats: 5}\n")
    code, _, err = run("bench", "--preset", "ci", "--set", "bench.rank=4", "--out", "o.json", "--resume")
    assert code == 0
    [(config, root, out, resume, preset)] = bench.seen
    assert (config.bench.rank, config.bench.repeats) == (4, 2)
    assert (root, out, resume, preset) == (tmp_path, tmp_path / "o.json", True, "ci")
    assert f"picture: {tmp_path}/o.png" in err.replace("\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {"preft.yaml", "o.json", "o.png", "o.csv"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["comapre", "a", "b"], "No such command 'comapre'. Did you mean 'compare'?"),
        (["stray"], "No such command 'stray'"),
        (["--preset", "s-lore"], "--preset s-lore: there is no such preset (did you mean s-lora?)"),
        (["--fail-on", "lorp/base<1"], "no arm lorp (did you mean lorap?)"),
        (["--fail-on", "lorap/base"], "--fail-on lorap/base: expected a quantity, a sign and a number"),
        (["--sweep", "num_adapters=0,1"], "--sweep num_adapters=0,1: bench.num_adapters: must be more than 0, found 0"),
        (["--sweep", "rank=1", "--sweep", "rank=2"], "--sweep is given 2 times; a run sweeps one key"),
        (["--sweep", "rank=1", "--resume"], "--sweep with --resume needs --out FILE.json"),
        (["--sweep", "rank=1", "--dry-run", "--fail-on", "x"], "--fail-on x: expected"),
        (["--json", "compare", "a", "b"], "preft bench compare: give --json behind compare"),
        (["compare", "a"], "Missing argument 'B.json'"),
        (["compare", "a", "b", "c"], "unexpected extra argument"),
        (["compare", "a.json", "b.json"], "a.json: no such file; preft bench --out a.json writes one"),
    ],
)
def test_bad_usage_is_refused_before_anything_runs(
    run: Run,
    bench: FakeBench,
    arguments: list[str],
    said: str,
) -> None:
    code, out, err = run("bench", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert bench.seen == []


def test_help_names_both(run: Run) -> None:
    _, out, _ = run("bench", "--help")
    assert "Measure throughput with and without adapters, or compare two results." in out
    assert "compare  Show what changed from one result to another beyond noise." in out
    assert all(option in out for option in ("--preset", "--fail-on", "--sweep", "--resume", "--out", "--dry-run"))
    assert "--json" in run("bench", "compare", "--help")[1]


def test_a_sweep(run: Run, bench: FakeBench, tmp_path: Path) -> None:
    arguments = ("bench", "--sweep", "num_adapters=1,8", "--out", "s.json", "--json")
    code, out, err = run(*arguments, "--fail-on", "lorap/base<0.9")
    assert code == 3
    assert [point["value"] for point in json.loads(out)["points"]] == [1, 8]
    assert "error: num_adapters=1: lorap/base is 0.8" in err
    assert "error: num_adapters=8: lorap/base is 0.8" in err
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert names == {"s.json", "s.png", "s.csv", "s/num_adapters=1.json", "s/num_adapters=8.json"}
    bench.refuses = 8  # what an earlier sweep measured is not taken for this one's
    code, out, err = run(*arguments)
    assert code == 1
    assert json.loads(out)["points"][1]["error"] == "does not fit"
    assert "warning: num_adapters=8: does not fit" in err
    bench.seen.clear()
    bench.refuses = None
    assert run(*arguments, "--resume")[0] == 0
    assert [config.bench.num_adapters for config, *_ in bench.seen] == [8]


def test_the_plan_of_a_sweep(run: Run, fake: Any) -> None:
    made = make_result()
    fake("preft_cli.bench.plan", plan_bench=lambda config, root: made.hardware.model_copy())
    code, out, _ = run("bench", "--dry-run")
    assert code == 0
    assert json.loads(out)["cores"] == 2
    code, out, _ = run("bench", "--sweep", "rank=4,8", "--dry-run")
    assert code == 0
    assert [(plan["value"], plan["plan"]["cores"]) for plan in json.loads(out)["plans"]] == [(4, 2), (8, 2)]


def test_compare(run: Run, tmp_path: Path) -> None:
    make_result(SPEEDS, path=tmp_path / "a.json")
    make_result(SPEEDS | {"lorap": [9.0, 9, 9]}, path=tmp_path / "b.json", commit="4567def")
    code, out, err = run("bench", "compare", "a.json", "b.json")
    assert (code, err) == (0, "")
    assert "commit" in out
    assert "+12.5%" in out
    code, out, _ = run("bench", "compare", "a.json", "b.json", "--json")
    document = json.loads(out)
    assert document["settings"] == [{"name": "commit", "a": "0123abc", "b": "4567def"}]
    assert {change["name"] for change in document["changes"] if change["changed"]} >= {"lorap/base", "lorap/lora"}


def test_sigterm_ends_a_run_as_ctrl_c_does(run: Run, bench: FakeBench) -> None:
    before = signal.getsignal(signal.SIGTERM)
    tidied = []

    def interrupted() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            tidied.append(True)

    bench.instead = interrupted
    assert run("bench")[0] == 128 + signal.SIGTERM
    assert tidied == [True]
    assert signal.getsignal(signal.SIGTERM) is before
