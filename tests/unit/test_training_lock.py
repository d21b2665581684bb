"""One `preft train` at a time writes to a run's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.training.lock import NAME, only_writer
from preft_cli.training.output import RunFolder
from preft_cli.training.run import train


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    config = PreftConfig.model_validate({"train": {"output_dir": "run"}})
    with only_writer(tmp_path / "run"):
        assert not RunFolder(tmp_path / "run").in_use(), "a lock is nothing that could be lost"
        with pytest.raises(UserError, match=rf"run: another preft train \(process {os.getpid()}\) is writing there"):
            train(config, tmp_path)
    assert not (tmp_path / "run").exists(), "nothing was written"
    with pytest.raises(UserError, match=r"train\.file: .* does not exist"):
        train(config, tmp_path)


def test_what_was_written_stays(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"):
        (tmp_path / "run" / "adapter").mkdir()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["adapter"]


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("999999")
    with only_writer(tmp_path):
        assert (tmp_path / NAME).read_text() == str(os.getpid())
