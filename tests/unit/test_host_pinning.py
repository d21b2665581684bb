"""On a GPU machine, host memory is pinned in a thread while the engine starts."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_patch.errors import PreftError
from engine_patch.pool import host, pinned
from tests.unit.pools import random_adapter, tiers, write

PAGES = 4
"""Of an adapter of rank 4 on all modules, in float32."""


@pytest.fixture
def unpinned() -> list[int]:
    return []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, unpinned: list[int]) -> Iterator[Any]:
    """What a test leaves is collected while there is a CUDA that it can be unpinned from."""

    def make(pin: Any) -> host.HostTier:
        monkeypatch.setattr(host, "pin_memory", pin)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=unpinned.append))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        small = tiers(PAGES, PAGES).host
        return host.HostTier(PAGES * 4096, small._sharer, torch.device("cuda"))

    yield make
    gc.collect()


def test_memory_for_a_gpu_can_be_written_to_and_outlives_what_it_was_cut_from() -> None:
    gpu = torch.device("cuda")
    memory = pinned.host_buffer(3 << 20, gpu)
    part = memory[1 << 20 : 2 << 20]
    memory.fill_(7)
    del memory
    gc.collect()
    assert int(part.sum(dtype=torch.int64)) == 7 << 20
    assert pinned.host_buffer(0, gpu).numel() == 0


def test_memory_that_a_gpu_will_use_is_in_huge_pages_and_there_before_it_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many pages as it has are resident when CUDA is asked to pin it, and the kernel was asked for huge ones."""
    resident = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        resident.append((*region(address), num_bytes))
        return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    memory = pinned.host_buffer(8 << 20, torch.device("cuda"))
    pinned.pin_memory(memory, 0)
    [(kib, flags, num_bytes)] = resident
    assert num_bytes == 8 << 20
    assert kib >= 8 << 10
    assert "hg" in flags


def region(address: int) -> tuple[int, list[str]]:
    """Resident KiB and flags of the memory that `address` lies in, by the kernel."""
    found: dict[str, str] = {}
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(number, 16) for number in head.split("-"))
            here = start <= address < end
        elif here:
            name, _, value = line.partition(":")
            found[name] = value
    return int(found["Rss"].split()[0]), found["VmFlags"].split()


def test_more_memory_than_there_is_is_told() -> None:
    with pytest.raises(PreftError, match=r"no host memory for 1\d+\.\d GB .*; lower serve.host_pool"):
        pinned.host_buffer(1 << 57, torch.device("cuda"))


def test_it_goes_on_in_a_thread_and_the_first_load_waits_for_it(made: Any, tmp_path: Path) -> None:
    gate, seen = threading.Event(), []

    def pin(buffer: torch.Tensor, device: int) -> None:
        assert gate.wait(10)
        seen.append((buffer.numel(), device))

    found = made(pin)
    assert not seen
    threading.Timer(0.2, gate.set).start()
    ref = write(tmp_path, "a", random_adapter(1))
    deadline = time.monotonic() + 10
    while not found.start(ref, ()):  # its header is looked at first
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert seen == [(PAGES * 4096, 3)]
    while not found.ready(ref):  # else a thread keeps all of it
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_memory_that_cannot_be_pinned_ends_the_start(made: Any, unpinned: list[int]) -> None:
    def pin(buffer: torch.Tensor, device: int) -> None:
        raise PreftError("2.1 GB of host memory cannot be pinned")

    found = made(pin)
    with pytest.raises(PreftError, match="cannot be pinned"):
        found.settle()
    del found
    gc.collect()
    assert unpinned == []


def test_what_goes_while_it_is_being_pinned_is_unpinned_afterwards(made: Any, unpinned: list[int]) -> None:
    """As when the engine's start fails in the next line."""
    gate, pinned = threading.Event(), list[int]()

    def pin(buffer: torch.Tensor, device: int) -> None:
        assert gate.wait(10)
        time.sleep(0.05)
        pinned.append(buffer.data_ptr())

    found = made(pin)
    time.sleep(0.05)  # so the thread has begun
    gate.set()
    del found
    gc.collect()
    assert len(pinned) == 1
    assert unpinned == pinned
