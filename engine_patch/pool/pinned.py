"""Host memory that a GPU copies from by itself."""

from __future__ import annotations

import mmap
from concurrent.futures import Future
from contextlib import suppress

import torch

from engine_patch.errors import PreftError


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that nothing was written to yet, uint8 `[num_bytes]`; in huge pages where a GPU will use it and Linux has them.

    Raises:
        PreftError: the system does not have so much.
    """
    if device.type != "cuda" or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PreftError(
            f"there is no host memory for {num_bytes / 1e9:.1f} GB ({error}); lower serve.host_pool"
        ) from error
    with suppress(AttributeError, OSError):  # a Python or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin_memory(buffer: torch.Tensor, device: int) -> None:
    """Lock `buffer` into memory as it is, for a device. PyTorch's own allocator would round its size up to a power of two.

    It is written to first. CUDA's other calls wait while memory is registered, and would wait for the kernel to find each page:
    for 16 GiB 0.5 s instead of 5.7 (`tests.benchmarks.bench_pinning`).

    Raises:
        PreftError: the system does not allow so much.
    """
    torch.cuda.set_device(device)  # of this thread
    buffer.zero_()
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise PreftError(
            f"{buffer.numel() / 1e9:.1f} GB of host memory cannot be pinned (CUDA error {int(error)}); lower serve.host_pool"
        )


def unpin_memory(address: int, pinning: Future[None]) -> None:
    """Undo `pin_memory` for the buffer at `address`, which may be under way, or have failed."""
    if pinning.cancel() or pinning.exception() is not None:
        return
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
