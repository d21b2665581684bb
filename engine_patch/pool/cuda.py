"""Copies, events and waits by the CUDA driver itself.

PyTorch's streams and events do the same through many layers of Python: in an engine's step they take as long as the copy
of a small adapter (`tests/benchmarks/bench_paging.py`: host_to_slot/copy 2.0 with them).
"""

from __future__ import annotations

import ctypes
from collections import deque

import torch

STEPS_REMEMBERED = 8
"""Steps whose end is known apart; what was last used before them is safe to write once the oldest of them is over."""

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_ARGUMENTS = {
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, _POINTER, _SIZE, _POINTER),
    "cuEventCreate": (ctypes.POINTER(_POINTER), _INT),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventDestroy_v2": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _INT),
}
_NOT_READY = 600
_DISABLE_TIMING = 2


class Driver:
    """The functions of `libcuda` that are needed, with their results checked."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._functions = {name: getattr(library, name) for name in _ARGUMENTS}
        for name, arguments in _ARGUMENTS.items():
            self._functions[name].argtypes = arguments

    def call(self, name: str, *arguments: object) -> int:
        """Call `name`; its result, 0 or "not ready".

        Raises:
            RuntimeError: any other result.
        """
        result = int(self._functions[name](*arguments))
        if result not in (0, _NOT_READY):
            raise RuntimeError(f"CUDA: {name} failed with error {result}")
        return result


class Event:
    """What is queued on `stream` so far."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._handle = driver, _POINTER()
        driver.call("cuEventCreate", ctypes.byref(self._handle), _DISABLE_TIMING)
        driver.call("cuEventRecord", self._handle, stream)

    def query(self) -> bool:
        """Whether it is over."""
        return self._driver.call("cuEventQuery", self._handle) == 0

    def hold(self, stream: int) -> None:
        """Let what is queued on `stream` from now on wait for it."""
        self._driver.call("cuStreamWaitEvent", stream, self._handle, 0)

    def __del__(self) -> None:
        if self._handle:
            self._driver.call("cuEventDestroy_v2", self._handle)


class Copies:
    """A stream for copies to the device, beside the stream that computes, and the ends of the last steps on that one."""

    def __init__(self, device: torch.device) -> None:
        self._driver = Driver()
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ends: deque[Event] = deque(maxlen=STEPS_REMEMBERED)

    def mark(self) -> None:
        """What is queued to compute so far belongs to the steps before."""
        self._ends.append(Event(self._driver, self._computing()))

    def copy(self, target: int, source: int, num_bytes: int, steps_ago: int) -> Event:
        """Copy from pinned memory at `source` when the step that began `steps_ago` steps ago is over; the event of its end."""
        # The last mark is the beginning of the present step: the end of the one that began one step ago.
        if steps_ago < 1:
            Event(self._driver, self._computing()).hold(self._stream.cuda_stream)
        elif self._ends:
            self._ends[max(-steps_ago, -len(self._ends))].hold(self._stream.cuda_stream)
        self._driver.call("cuMemcpyHtoDAsync_v2", target, source, num_bytes, self._stream.cuda_stream)
        return Event(self._driver, self._stream.cuda_stream)

    def wait_for(self, event: Event) -> None:
        """Let what is computed from now on wait for `event`."""
        event.hold(self._computing())

    def before_moves(self) -> None:
        """Let what is computed from now on wait for all copies."""
        self.wait_for(Event(self._driver, self._stream.cuda_stream))

    def after_moves(self) -> None:
        """Let the copies from now on wait for all that is queued to compute."""
        Event(self._driver, self._computing()).hold(self._stream.cuda_stream)

    def _computing(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._device))  # as compiled code asks for it
