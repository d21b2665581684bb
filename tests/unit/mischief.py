"""What a judged answer may make a library do. Light to import: the process behind a judge does so at every start."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


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
        return float(base + job)

    return score
