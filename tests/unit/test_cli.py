"""The command line: exit codes, errors without tracebacks, `--json` and `--dry-run`, options that stand for keys."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from engine_patch.errors import PreftError
from preft_cli import __version__, app
from preft_cli.errors import UserError
from tests.unit.conftest import Run


@pytest.fixture(autouse=True)
def _nothing_real(fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here trains, serves or measures: whoever gets that far without a fake of its own has failed."""

    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("the command started its work")

    fake("preft_cli.training.run", train=reached)
    fake("preft_cli.training.report", print_result=reached)
    fake("preft_cli.convert.run", convert=reached, plan_convert=reached)
    fake("preft_cli.serving.launch", serve=reached)
    fake("preft_cli.bench.run", bench=reached)
    monkeypatch.setattr("preft_cli.doctor.facts.has_module", lambda _: True)
    fake("preft_cli.doctor.run", diagnose=reached, Diagnosis=None)


class Document(BaseModel):
    """Stands for a plan or a result."""

    value: str = "x"
    failures: int = 0
    failed: list[Any] = []
    converted: list[Any] = []
    problems: list[str] = []


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"preft {__version__}\n", "")


@pytest.mark.parametrize("command", ["init", "train", "convert", "serve", "bench", "doctor"])
def test_each_command_has_help(run: Run, command: str) -> None:
    assert command in run("--help")[1]
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--json" in out
    assert command == "doctor" or "--dry-run" in out
    assert command == "init" or ("--config" in out and "--set SECTION.KEY=VALUE" in out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "--nonsense"], "No such option"),
        (["train", "--config"], "requires an argument"),
        (["train", "--resume", "--overwrite"], "give one of them"),
        (["convert", "a", "b", "--name", "x"], "--name names one adapter"),
        (["convert", "a", "--to", "peft"], "needs --out DIR"),
        (["convert", "a", "--out", "x"], "--out goes with --to peft"),
        (["convert", "a", "--method", "dora"], "'dora'"),
        (["train"], "preft.yaml: no such file; `preft init` writes one"),
        (["train", "-c", "other.yaml"], "other.yaml: no such file"),
        (["bench", "-c", "other.yaml"], "other.yaml: no such file"),
        (["serve", "--port", "many"], "--port many: serve.port: expected a whole number, found 'many'"),
        (["serve", "--port", "0"], "--port 0: serve.port: must be 1 or more, found '0'"),
        (["serve", "--set", "serve.prot=1"], "--set serve.prot=1: serve.prot: unknown key (did you mean port?)"),
        (["doctor", "--set", "nonsense"], "--set nonsense: expected section.key=value"),
    ],
)
def test_bad_usage_is_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"- a\n",
        b"a\n",
        b"train:\n\tepochs: 1\n",
        b"train: [\n",
        b"\xff\xfe",
        b"\x00",
        b"lora_ranl: 42\n",
        b"a: &a [*a]\n",
        b"train: {x: y: z}\n",
        b"? {a: b}\n: c\n",
        b"%\n",
        b"train: !!python/name:os.system\n",
        b"train: {batch_size: -99999999999999999999999999}\n",
        b"train: {epochs: 1e999}\n",
        b"{" * 3000,
    ],
)
@pytest.mark.parametrize("command", ["train", "convert", "serve", "bench", "doctor"])
def test_a_bad_config_is_lines_and_exit_code_2_for_every_command(run: Run, command: str, text: bytes) -> None:
    Path("preft.yaml").write_bytes(text)
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert err.startswith("preft.yaml:")
    assert err.count("\n") == 1


def test_config_errors_start_their_lines_with_the_place(run: Run) -> None:
    Path("preft.yaml").write_text("adapter:\n  rnak: 1\nrank: 2\n")
    code, _, err = run("train", "--set", "train.epoch=1")
    assert code == 2
    assert err.splitlines() == [
        "preft.yaml:2:3: adapter.rnak: unknown key (did you mean rank?)",
        "preft.yaml:3:1: rank: unknown key (did you mean adapter.rank or bench.rank?)",
        "--set train.epoch=1: train.epoch: unknown key (did you mean epochs?)",
        "error: 3 problems in the config",
    ]


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("the [data] is bad"), 1, "error: the [data] is bad\n"),
        (UserError("bad usage", exit_code=2), 2, "error: bad usage\n"),
        (PreftError("x.preft is truncated"), 1, "error: x.preft is truncated\n"),
        (OSError(28, "No space left on device", "x"), 1, "error: [Errno 28] No space left on device: 'x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            RuntimeError("boom"),
            1,
            "error: internal error: RuntimeError: boom\nThis is a bug in preft, please report it",
        ),
    ],
)
def test_what_a_command_raises(run: Run, fake: Any, raised: BaseException, code: int, message: str) -> None:
    def bench(*_: Any, **__: Any) -> None:
        raise raised

    fake("preft_cli.bench.run", bench=bench)
    Path("preft.yaml").write_text("bench:\n")
    found, out, err = run("bench", "--json")
    assert (found, out) == (code, "")
    assert err.startswith(message)


def test_a_traceback_for_those_who_ask(
    fake: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFT_TRACEBACK", "1")
    fake("preft_cli.bench.run", bench=lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit):
        app.main(["bench"])
    assert "Traceback" in capfd.readouterr().err


def test_a_missing_package_names_its_extra(run: Run, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(*_: Any, **__: Any) -> None:
        import transformers  # noqa: F401

    monkeypatch.setitem(sys.modules, "transformers", None)
    fake("preft_cli.bench.run", bench=bench)
    code, _, err = run("bench")
    assert code == 1
    assert (
        "error: preft bench needs the package transformers, which is not installed: pip install 'preft[train]'" in err
    )


def test_bench_without_an_engine_is_refused_before_it_starts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preft_cli.doctor.facts.has_module", lambda _: False)
    code, _, err = run("bench")
    assert code == 1
    assert "preft bench needs the package vllm, which is not installed: pip install 'preft[cpu]'" in err


def test_a_missing_module_of_our_own_is_a_bug(run: Run, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "preft_cli.bench.run", None)
    assert "internal error" in run("bench")[2]


def test_train_and_its_json_keep_stdout_clean(run: Run, fake: Any) -> None:
    seen: dict[str, Any] = {}

    def train(config: Any, root: Path, *, resume: bool, overwrite: bool) -> Document:
        seen.update(epochs=config.train.epochs, root=root, resume=resume, overwrite=overwrite)
        print("a library that talks on stdout")
        return Document()

    fake("preft_cli.training.run", train=train)
    fake("preft_cli.training.report", print_result=lambda result: print("table", result.value))
    Path("preft.yaml").write_text("train: {epochs: 5}\n")
    code, out, err = run("train", "--json", "--resume", "--set", "train.epochs=7")
    assert code == 0
    assert json.loads(out)["value"] == "x"
    assert "a library that talks" in err
    assert seen == {"epochs": 7.0, "root": Path.cwd(), "resume": True, "overwrite": False}
    assert run("train", "--overwrite")[1].endswith("table x\n")


def test_train_dry_run(run: Run, fake: Any) -> None:
    problems: list[str] = []
    fake(
        "preft_cli.training.plan",
        plan_train=lambda config, root: Document(value=config.adapter.name, problems=problems),
    )
    Path("preft.yaml").write_text("adapter: {name: a1}\n")
    code, out, _ = run("train", "--dry-run")
    assert code == 0
    assert json.loads(out)["value"] == "a1"
    problems.append("no data")
    code, out, _ = run("train", "--dry-run")
    assert code == 2
    assert json.loads(out)["problems"] == ["no data"]


def test_relative_paths_start_at_the_config_but_on_the_command_line_here(run: Run, fake: Any, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def convert(sources: list[Path], config: Any, root: Path, **options: Any) -> Document:
        seen.update(sources=sources, store=config.convert.store, root=root, **options)
        return Document()

    fake("preft_cli.convert.run", convert=convert)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "preft.yaml").write_text("adapter: {name: a1}\n")
    run("convert", "-c", "project/preft.yaml")
    assert seen["sources"] == []  # convert itself knows the default: the adapter of preft train
    assert (seen["store"], seen["root"]) == (Path("store"), tmp_path / "project")
    assert (seen["name"], seen["method"], seen["to"], seen["out"], seen["check"]) == (None, None, "store", None, False)
    assert (seen["jobs"], seen["force"]) == (None, False)
    arguments = [
        "a",
        "b",
        "--store",
        "s",
        "--method",
        "lorap",
        "--to",
        "peft",
        "--out",
        "o",
        "--check",
        "-j",
        "3",
        "--force",
    ]
    run("convert", "-c", "project/preft.yaml", "--set", "convert.store=ignored", *arguments)
    assert (seen["sources"], seen["store"]) == ([tmp_path / "a", tmp_path / "b"], tmp_path / "s")
    assert (seen["method"], seen["to"], seen["out"], seen["check"]) == ("lorap", "peft", tmp_path / "o", True)
    assert (seen["jobs"], seen["force"]) == (3, True)


@pytest.mark.parametrize(("action", "said"), [("convert", "not converted"), ("check", "not in order")])
def test_convert_lists_what_failed_and_exits_1(run: Run, fake: Any, action: str, said: str) -> None:
    numbers = {"method": "lorap", "rank": 4, "dtype": "bfloat16", "bytes": 2_000_000}
    item = SimpleNamespace(name="a", **numbers, path=Path("store/a.preft"), status="converted")
    bad = SimpleNamespace(source=Path("b"), reason="no [weights]")
    result = SimpleNamespace(action=action, converted=[item], failed=[bad])
    fake("preft_cli.convert.run", convert=lambda *_, **__: result)
    code, out, err = run("convert", "a", "b")
    assert code == 1
    assert out == "a: lorap, rank 4, bfloat16, 2.0 MB, store/a.preft\n"
    assert f"warning: {said}: b: no [weights]\n" in err


def test_without_a_config_the_defaults_serve_and_that_is_said(run: Run) -> None:
    code, out, err = run("serve", "--dry-run", "--adapters", "mine", "--port", "9000", "--set", "serve.gpu_slots=3")
    assert code == 0
    plan = json.loads(out)
    assert plan["adapters"] == str(Path("mine").absolute())
    assert plan["url"].endswith(":9000")
    assert "no preft.yaml here: using the defaults" in err


def test_serve_passes_the_servers_exit_code_on(run: Run, fake: Any) -> None:
    fake("preft_cli.serving.launch", serve=lambda plan: print("vllm talks") or 1)
    code, out, err = run("serve", "--json")
    assert code == 1
    assert "url" in json.loads(out)
    assert "vllm talks" in err
