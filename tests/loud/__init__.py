"""Thousands of mixed requests with adapters whose mix-up would change the text: `python -m tests.loud --help`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


class Run:
    """The command in a process of its own, for tests; on one core where it computes on a CPU."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.loud", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self, timeout: float = 800) -> tuple[int, dict[str, Any]]:
        """Its exit code, and what it printed, with the end of its standard error as `said`."""
        printed, said = self.process.communicate(timeout=timeout)
        assert printed, said[-4000:]
        return self.process.returncode, json.loads(printed.splitlines()[-1]) | {"said": said[-4000:]}
