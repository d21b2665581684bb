"""The base model with a method's parts on it: one face for whatever is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine_patch.adapter import LowRankPair
from engine_patch.rule import is_prefill_only
from preft_cli.adapters.files import load_safetensors
from preft_cli.config.schema import AdapterConfig
from preft_cli.errors import UserError
from preft_cli.methods import parts_of
from preft_cli.methods.base import Attached
from preft_cli.methods.mask import PromptMask

STATE = "trainable.safetensors"
"""In a checkpoint: the parameters as they are trained, which is not always as they are saved for use (`orthogonal`)."""


class AdaptedModel:
    """A frozen base model with the trainable, float32 parts of an adapter, which starts as a no-op.

    With a prefill-only method each forward pass needs `mask.set` before it, and is refused without.
    """

    def __init__(self, base: Any, config: AdapterConfig, targets: Mapping[str, Sequence[str]]) -> None:
        """`targets`: by part, the names of the modules to adapt (`Part.targets`)."""
        base.requires_grad_(False)
        self.model = base
        """What the trainer trains and calls."""
        self.mask = PromptMask()
        self._attached: list[Attached] = []
        for part in parts_of(config.method):
            attached = part.attach(self.model, config, targets[part.name])
            if is_prefill_only(config.method):
                attached.mask(self.mask)
            self._attached.append(attached)
            self.model = attached.model

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside of this block the model computes as the base model does."""
        with ExitStack() as stack:
            for attached in self._attached:
                stack.enter_context(attached.disabled())
            yield

    def live_pairs(self) -> dict[str, LowRankPair]:
        """The trained weights of all parts, where they are: the next step changes them."""
        return {name: pair for attached in self._attached for name, pair in attached.pairs().items()}

    def pairs(self) -> dict[str, LowRankPair]:
        """A copy of them on the CPU, independent of the model."""
        return {name: pair.map(lambda tensor: tensor.to("cpu", copy=True)) for name, pair in self.live_pairs().items()}

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """A copy of the trained parameters, on the CPU, as they are trained."""
        return {name: p.detach().to("cpu", copy=True).contiguous() for name, p in self.trainable().items()}

    @torch.no_grad()
    def put(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave for a model of the same config, bit for bit."""
        for name, parameter in self.trainable().items():
            parameter.copy_(state[name])

    def save_state(self, folder: Path) -> None:
        """Write the trained parameters to `folder`, for `load_state`."""
        save_file(self.state(), folder / STATE)

    def load_state(self, folder: Path) -> None:
        """Put back what `save_state` wrote for a model of the same config, bit for bit.

        Raises:
            UserError: the file is missing, damaged, or of another run.
        """
        path = folder / STATE
        if not path.is_file():
            raise UserError(f"{path} is missing, so that run cannot be continued; start anew with --overwrite")
        state = load_safetensors(path)
        if {name: t.shape for name, t in state.items()} != {name: p.shape for name, p in self.trainable().items()}:
            raise UserError(f"{path} does not hold the parameters of this run; start anew with --overwrite")
        self.put(state)
