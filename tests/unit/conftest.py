"""Fixtures of several test files: upstream's vLLM in a process where it may have been patched before; the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from engine_patch import patching
from preft_cli import app

if TYPE_CHECKING:
    from tests.unit.bench_engines import FakeEngines

Run = Callable[..., tuple[int, str, str]]
"""The fixture `run`."""


def _undo() -> None:
    for one in reversed(patching.ledger.values()):
        if one.upstream is None:
            delattr(one.owner, one.attribute)
        else:
            setattr(one.owner, one.attribute, one.upstream)
    patching.ledger.clear()


@pytest.fixture
def upstream() -> Iterator[None]:
    """vLLM as it came; what the test replaces is put back after it, and what was replaced before it is replaced again."""
    before = dict(patching.ledger)
    _undo()
    yield
    _undo()
    for one in before.values():
        setattr(one.owner, one.attribute, one.ours)
    patching.ledger.update(before)


@pytest.fixture(scope="session")
def scheduler_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for `tests.unit.scheduling`, which computes nothing with it."""
    from tests.unit.tiny_llama import save_base

    folder = tmp_path_factory.mktemp("scheduler") / "model"
    save_base(folder, max_position_embeddings=256)
    return folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `preft ARGUMENTS` in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            app.main(list(arguments))
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        assert isinstance(end.value.code, int)
        return end.value.code, captured.out, captured.err

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a module with the given functions in place of a module of this package."""

    def fake(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return fake


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    """Fake engines for `preft bench`; torch is loaded by the tests that ask for it alone."""
    from tests.unit.bench_engines import fake_engines

    return fake_engines(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny base model, for whoever trains on it."""
    from tests.unit.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture
def one_thread() -> None:
    """Tiny models are slower on several."""
    import torch

    torch.set_num_threads(1)
