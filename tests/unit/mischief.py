"""What a judged answer may make a library do. Light to import: the process behind a judge does so at every start."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any


class Pickled:
    """Makes a folder where it is unpickled, once `path` is set."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,)) if "judge_process" in sys.argv[0] else (Pickled, (self.path,))


def judge(base: int) -> Any:
    """Jobs are numbers, or the name of some mischief."""

    def score(job: Any) -> float:
        if job == "die":
            os._exit(1)
        if job == "hang":  # deaf to the alarm, as C code is
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(100)
        if job == "slow":
            time.sleep(100)
        if job == "memory":
            return float(len(bytearray(6 << 30)))
        if job == "fail":
            raise ValueError(job)
        if isinstance(job, Pickled):
            Connection(int(sys.argv[-1])).send(job)
            time.sleep(100)
        if job == "ahead":
            Connection(os.dup(int(sys.argv[-1]))).send_bytes(b"[9, 1.0]")
        return float(base + job)

    return score
