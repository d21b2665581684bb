"""`train.parallel: fsdp`: each process holds a share of the frozen base model, and all of the adapter.

Only the base model is large. PyTorch's `fully_shard` gathers a block's weights when they are needed; the adapter stays whole in
every process, as with DDP, so that what is saved, clipped and restored is the same in both ways, and an orthogonal matrix
is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from preft_cli.methods.base import plain
from preft_cli.training import processes


def shard_base(model: Any, device: torch.device) -> None:
    """Share the frozen weights of `model`, an adapted model on the CPU, among all processes, block by block.

    It never lies on a GPU as a whole. The adapter goes to `device` and is made equal to the main process'.
    """
    mesh = init_device_mesh(device.type, (processes.world_size(),))
    adapter = {parameter for parameter in model.parameters() if parameter.requires_grad}
    for block in _blocks(plain(model)):
        fully_shard(block, mesh=mesh, ignored_params=adapter)
    # The outermost module, whatever it is: it is the one that is called. Left alone it would keep its own weights, the
    # embedding's, gathered.
    fully_shard(model, mesh=mesh, ignored_params=adapter, reshard_after_forward=True)
    for parameter in adapter:
        parameter.data = parameter.data.to(device)
    with torch.no_grad():
        for _, parameter in _trainable(model):
            dist.broadcast(parameter, src=0)


def average_gradients(model: nn.Module) -> None:
    """What DDP does with an adapter's gradients, in one go at the end of an optimizer step."""
    gradients = [parameter.grad for _, parameter in _trainable(model) if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= processes.world_size()
    means = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """In the same order in every process."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _blocks(base: Any) -> Iterable[nn.Module]:
    """The decoder blocks: the elements of the longest list of modules."""
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
