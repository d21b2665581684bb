"""The processes of one run: who this one is, and what they tell each other.

They are told apart by the environment that torchrun and `accelerate launch` set, and `preft train` for `train.num_processes`.
Everything here does nothing, or gives back what it was given, where there is one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def world_size() -> int:
    """The number of processes."""
    # Some clusters set WORLD_SIZE for jobs that are no torch processes; LOCAL_RANK comes from a launcher alone.
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def rank() -> int:
    """This process' number, from 0 on."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def is_main() -> bool:
    """Whether this is the process that writes files and talks to people."""
    return rank() == 0


def any_of(flag: bool) -> bool:
    """Whether it is true in at least one process; all of them must ask."""
    return bool(total(float(flag)) > 0)


def total(*numbers: float) -> Any:
    """Sums over all processes, in float64; a number for one number, else a list. All of them must ask."""
    sums = _reduced(numbers, "SUM")
    return sums if len(sums) > 1 else sums[0]


def largest(number: int) -> int:
    """The largest of all processes; all of them must ask."""
    return int(_reduced([number], "MAX")[0])


def _reduced(numbers: Sequence[float], how: str) -> list[float]:
    if world_size() == 1:
        return list(numbers)
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(numbers, dtype=torch.float64, device=_device())
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, how))
    return [float(number) for number in tensor.tolist()]


def from_main(value: T) -> T:
    """What the main process has; all of them must ask."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, device=_device())
    return box[0]


def leave() -> None:
    """End the connection to the others, so that none of them waits for this one."""
    if world_size() > 1:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def quiet_others() -> Iterator[None]:
    """Inside of this block the main process alone talks to people; what only another one stumbles over is shown."""
    from preft_cli.console import err
    from preft_cli.errors import UserError

    before, err.quiet = err.quiet, err.quiet or not is_main()
    try:
        yield
    except (UserError, KeyboardInterrupt):  # all of them have it, and the main process tells
        raise
    except BaseException:
        err.quiet = before
        raise
    if is_main():
        err.quiet = before


def _device() -> Any:
    """Where collectives take their tensors from."""
    import torch
    import torch.distributed as dist

    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
