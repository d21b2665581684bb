"""How CPU threads wait, decided before torch is loaded."""

from __future__ import annotations

import os


def wait_politely() -> None:
    """Let OpenMP threads sleep at barriers instead of spinning, here and in child processes; a person's own setting wins.

    Whoever shares the cores (a server and its engine, training beside a test run) is slowed sixfold by spinning: two threads of
    a 135M model's forward and backward pass took 28 s a step on two busy cores, 5 s when they slept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
