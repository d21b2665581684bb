"""Interventions behind the decoder blocks of a Transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from engine_patch.adapter import LowRankPair
from engine_patch.residual import SUFFIX, block_of
from preft_cli.config.schema import AdapterConfig
from preft_cli.methods.base import Attached, plain
from preft_cli.methods.direftp.intervention import Intervention
from preft_cli.methods.direftp.targets import direft_rank
from preft_cli.methods.mask import PromptMask


class Interventions(Attached):
    """Each is a submodule of its block, `model.layers.3.residual`, so that whatever handles the model finds it."""

    def __init__(self, model: Any, config: AdapterConfig, targets: Sequence[str]) -> None:
        self.model = model
        self._by_stream: dict[str, Intervention] = {}
        base = plain(model)
        for stream in targets:
            block = base.get_submodule(block_of(stream))
            intervention = Intervention(
                base.config.get_text_config().hidden_size,
                direft_rank(config),
                orthogonal=config.orthogonal,
                dropout=config.dropout,
            )
            block.add_module(SUFFIX, intervention.to(next(block.parameters()).device))
            block.register_forward_hook(_intervene)
            self._by_stream[stream] = intervention

    def mask(self, mask: PromptMask) -> None:
        for intervention in self._by_stream.values():
            intervention.mask = mask

    @contextmanager
    def disabled(self) -> Iterator[None]:
        for intervention in self._by_stream.values():
            intervention.enabled = False
        try:
            yield
        finally:
            for intervention in self._by_stream.values():
                intervention.enabled = True

    def pairs(self) -> dict[str, LowRankPair]:
        return {
            name: LowRankPair(a=one.w1.detach(), b=one.w2.detach().T, scaling=1.0, bias=one.bias.detach())
            for name, one in self._by_stream.items()
        }


def _intervene(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A forward hook, so that gradient checkpointing, which repeats the block's `__call__`, repeats it too.

    Decoder layers return the stream, in some versions of Transformers as the first part of a tuple.
    """
    intervention = block.get_submodule(SUFFIX)
    if isinstance(output, tuple):
        return (intervention(output[0]), *output[1:])
    return intervention(output)
