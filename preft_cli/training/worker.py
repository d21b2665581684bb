"""One process of a run that `launch` started: `python -m preft_cli.training.worker FOLDER`, with the job on stdin."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from io import FileIO
from pathlib import Path

from engine_patch.store.atomic import atomic_write
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.threads import wait_politely
from preft_cli.training import processes
from preft_cli.training.interrupt import InterruptedRunError


def main() -> int:
    """Train; what goes wrong is written to FOLDER, where the process that launched this one reads it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts with &, and inherited
    wait_politely()
    try:
        # Without a buffer, whose lock a thread that waits for input would hold when Python ends.
        pipe = open(0, "rb", buffering=0)  # noqa: SIM115
        job = json.loads(pipe.readline())
        threading.Thread(target=_stop_when_orphaned, args=(pipe,), daemon=True).start()
        from preft_cli.training.run import train

        config = PreftConfig.model_validate(job["config"])
        train(config, Path(job["root"]), resume=job["resume"], overwrite=job["overwrite"])
    except UserError as error:
        stopped = isinstance(error.__cause__, InterruptedRunError)
        return _tell(str(error), error.exit_code, user_error=True, stopped=stopped)
    except KeyboardInterrupt:
        return _tell("interrupted", 130, interrupted=True)
    except Exception as error:
        if os.environ.get("PREFT_TRACEBACK"):
            traceback.print_exc()
        return _tell(f"{type(error).__name__}: {error}", 1)
    return 0


def _tell(message: str, exit_code: int, **kind: bool) -> int:
    """`kind`: a `user_error`, and after Ctrl-C `stopped` with a checkpoint, or `interrupted` without one."""
    kinds = dict.fromkeys(("user_error", "stopped", "interrupted"), False) | kind
    about = {"message": message, "exit_code": exit_code, **kinds}
    atomic_write(Path(sys.argv[1]) / f"error-{processes.rank()}.json", [json.dumps(about).encode()])
    return 1


def _stop_when_orphaned(pipe: FileIO) -> None:
    """Nobody is left to pass on a Ctrl-C or to read the result: save a checkpoint and end."""
    while pipe.read(1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
