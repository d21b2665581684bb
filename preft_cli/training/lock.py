"""One process at a time writes to a run's folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from preft_cli.errors import UserError

NAME = ".lock"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` (made if it is not there) for this process; the system lets go of it however the process ends.

    Raises:
        UserError: another process holds it.
    """
    if folder.is_file():  # refused elsewhere, as what it is
        yield
        return
    made = [folder, *(parent for parent in folder.parents if not parent.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(
                f"{folder}: another preft train (process {file.read().strip() or 'unknown'}) is writing there. Wait for it, "
                "or give another adapter.name or train.output_dir."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # something lies there, as it should
                for empty in made:
                    empty.rmdir()
