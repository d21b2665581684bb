"""How long other calls of CUDA wait while host memory is pinned: `python -m tests.benchmarks.bench_pinning`, on a GPU.

The host tier pins its memory in a thread while the engine compiles its model. `registering` is the time of `cudaHostRegister`,
`longest_call` that of the slowest small product and copy that another thread asked for meanwhile. `as it is`: memory that nothing
was written to; `touched`: written to first, page by page (`touching`); `huge`: in huge pages, where Linux has them.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_patch.pool.pinned import host_buffer
from tests.benchmarks.common import about, say, seconds, write

GIB = 1 << 30


def ordinary(num_bytes: int) -> torch.Tensor:
    """Memory as `malloc` gives it."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def huge(num_bytes: int) -> torch.Tensor:
    """Memory as the host tier takes it."""
    return host_buffer(num_bytes, torch.device("cuda"))


CASES: dict[str, tuple[Callable[[int], torch.Tensor], bool]] = {
    "as it is": (ordinary, False),
    "touched": (ordinary, True),
    "huge": (huge, False),
    "huge, touched": (huge, True),
}
"""How memory is taken, and whether it is written to before it is pinned."""


class Caller:
    """A thread that uses the GPU without a pause, and knows its slowest turn."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.longest = 0.0
        """Seconds of the slowest turn that has ended."""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Caller:
        self._thread.start()
        time.sleep(0.3)  # the first calls are slow by themselves
        self.longest = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        matrix = torch.randn(1024, 1024, device="cuda")
        while not self._stop.is_set():
            self.longest = max(self.longest, seconds(lambda: (matrix @ matrix).cpu()))


def measure(case: str, num_bytes: int) -> dict[str, Any]:
    """One case."""
    take, touched = CASES[case]
    memory = take(num_bytes)
    touching = seconds(memory.zero_) if touched else 0.0
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]
    caller = Caller()
    with caller:
        registering = seconds(lambda: _registered(cuda, memory))
    cuda.cudaHostUnregister(memory.data_ptr())
    found = {"touching": touching, "registering": registering, "longest_call": caller.longest}
    say(f"{case}: {', '.join(f'{name} {value:.2f} s' for name, value in found.items())}")
    return found


def _registered(cuda: Any, memory: torch.Tensor) -> None:
    if error := int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)):
        raise SystemExit(f"{memory.numel() / 1e9:.1f} GB cannot be pinned: CUDA error {error}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=16, help="of memory in each case")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_pinning needs a GPU: without one nothing is pinned")
    ordinary(arguments.gib * GIB).zero_()  # a machine whose memory grows as it is used has grown after this
    cases = {case: measure(case, arguments.gib * GIB) for case in CASES}
    write(arguments.out, about("pinning", gib=arguments.gib, threads=torch.get_num_threads()) | {"cases": cases})


if __name__ == "__main__":
    main()
