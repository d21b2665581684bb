"""The commands of the README, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.readme
@pytest.mark.engine
def test_first_project(tmp_path: Path) -> None:
    """Every line of the first project's block, in one shell that stops at the first failure."""
    (block,) = re.findall(r"## A first project.*?```bash\n(.*?)```", README, re.DOTALL)
    environment = {**os.environ, "PREFT": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-m", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"held-out loss: base [\d.]+, adapter [\d.]+ \(-(1[5-9]|[2-9]\d)\.\d%\)", ended.stderr + ended.stdout
    )
    assert "Ahoy" in ended.stdout
    assert (tmp_path / "pirate" / "store" / "my-style.preft").is_file()


@pytest.mark.parametrize("command", re.findall(r"^\| `preft (\w+)` \|.*\| `(preft .*)` \|$", README, re.MULTILINE))
def test_every_command_of_the_table_exists(command: tuple[str, str]) -> None:
    name, example = command
    words = example.split()
    assert words[:2] == ["preft", name]
    called = words[1:3] if name in ("store", "data") else [name]  # which have commands of their own
    shown = subprocess.run([sys.executable, "-m", "preft_cli", *called, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    for option in (word for word in words if word.startswith("--")):
        assert option in shown.stdout, f"{option} is not an option of preft {name}"
