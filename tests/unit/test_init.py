"""`preft init`: templates that load, a file that is never overwritten unasked."""

import json
import re
from importlib.metadata import PackagePath
from pathlib import Path
from types import SimpleNamespace

import pytest

from preft_cli import app
from preft_cli.commands import templates
from preft_cli.config.load import load
from preft_cli.errors import UserError

NAMES = sorted(templates.template_files())


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        app.main(["init", *arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_templates() -> None:
    assert {"domain", "memory", "minimal", "rl", "style", "tools"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_template_loads_and_describes_itself(name: str, tmp_path: Path) -> None:
    assert run(str(tmp_path), "--template", name) == 0
    written = tmp_path / "preft.yaml"
    load(written, [])
    assert written.read_text() == templates.read_template(name)
    assert written.read_text().startswith("# ")
    assert 10 < len(templates.templates()[name]) < 90


@pytest.mark.parametrize("name", NAMES)
def test_the_commented_lines_of_a_template_load_too(name: str, tmp_path: Path) -> None:
    """A key that is shown as a comment must exist: somebody will remove the `#`."""
    lines = templates.read_template(name).splitlines()
    shown = [
        line.replace("  # ", "  ", 1) if line.startswith("  # ") and ": " in line.split("#")[1] else line
        for line in lines
    ]
    shown = [line for line in shown if '{"messages"' not in line and not line.strip().startswith("One conversation")]
    path = tmp_path / "preft.yaml"
    path.write_text("\n".join(shown))
    load(path, [])


def test_the_record_in_the_tool_template_is_whole() -> None:
    text = templates.read_template("tools")
    (shown,) = re.findall(r'  # ({"tools".*?\]})\n  file', text, re.DOTALL)
    record = json.loads(shown.replace("\n  #", ""))
    called = record["messages"][1]["tool_calls"][0]["function"]["name"]
    assert called == record["tools"][0]["function"]["name"]


def test_the_default_template_is_the_persona(tmp_path: Path) -> None:
    assert run(str(tmp_path)) == 0
    assert (tmp_path / "preft.yaml").read_text() == templates.read_template("style")
    assert [path.name for path in tmp_path.iterdir()] == ["preft.yaml"]


def test_missing_folders_are_made_and_the_current_one_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(str(tmp_path / "a" / "b")) == 0
    assert (tmp_path / "a" / "b" / "preft.yaml").is_file()
    monkeypatch.chdir(tmp_path)
    assert run("--template", "minimal") == 0
    assert (tmp_path / "preft.yaml").is_file()


def test_nothing_is_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "preft.yaml"
    path.write_text("mine")
    assert run(str(tmp_path)) == 2
    assert "exists already and is left as it is; --force replaces it" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert run(str(tmp_path), "--force") == 0
    assert path.read_text() != "mine"


def test_a_dangling_link_counts_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "preft.yaml").symlink_to(tmp_path / "elsewhere")
    assert run(str(tmp_path)) == 2


def test_an_unknown_template_names_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path), "--template", "stile") == 2
    message = capsys.readouterr().err
    assert "no such template (did you mean style?)" in message
    assert "domain, memory, minimal, rl, style, tools" in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(str(tmp_path / "file" / "project")) == 1
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_list_dry_run_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES
    assert run("--list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"templates": templates.templates()}
    assert run(str(tmp_path), "--dry-run") == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "preft.yaml")
    assert list(tmp_path.iterdir()) == []
    assert run(str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["template"] == "style"


def test_installed_templates_are_found_through_the_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "python3" / "site-packages"
    names = ["../../../share/preft/templates/one.yaml", "preft_cli/app.py", "other/templates/two.yaml"]
    packaged = [PackagePath(name) for name in names]
    for path in packaged:
        path.dist = SimpleNamespace(locate_file=lambda name: packages / name)  # type: ignore[assignment]
    monkeypatch.setattr(templates, "_CHECKOUT", packages)
    monkeypatch.setattr(templates.importlib.metadata, "files", lambda _: packaged)
    with pytest.raises(UserError, match="this installation of preft is incomplete"):
        templates.template_files()
    packages.mkdir(parents=True)
    (tmp_path / "share" / "preft" / "templates").mkdir(parents=True)
    (tmp_path / "share" / "preft" / "templates" / "one.yaml").write_text("# One\n")
    assert templates.templates() == {"one": "One"}
