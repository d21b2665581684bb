"""For the tests that patch vLLM in this process, where an engine's front end may have patched it before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_patch import patching


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
