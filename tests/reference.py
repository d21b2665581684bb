"""The reference that served answers are held against: a plain Hugging Face forward pass in float32 with the mask i < n.

Written without the training code and without the engine's: the update is added by hooks on the base model's linear layers,
straight from the formula `y_i = W x_i + m_i scaling B A x_i`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine_patch.adapter import Adapter, LoraPair
from engine_patch.base_model import BaseFingerprint


class MaskedReference:
    """One base model, any adapter, token by token."""

    def __init__(self, model_dir: Path, device: str = "cpu") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()

    @torch.no_grad()
    def logprobs(
        self, prompt: list[int], generated: list[int], adapter: Adapter | None, adapted: int | None = None
    ) -> torch.Tensor:
        """Log-probability of each generated token, `[len(generated)]`; `adapted` overrides n (for wrong answers on purpose)."""
        last = len(generated)
        return self.sequence_logprobs(prompt + generated, adapter, len(prompt) if adapted is None else adapted, last)

    @torch.no_grad()
    def sequence_logprobs(self, ids: list[int], adapter: Adapter | None, adapted: int, last: int) -> torch.Tensor:
        """Log-probability of each of the `last` tokens of `ids`, `[last]`, with positions below `adapted` adapted."""
        device = self.model.device
        mask = torch.zeros(len(ids), 1, device=device)
        mask[:adapted] = 1
        with self._adapted(adapter, mask):
            logits = self.model(torch.tensor([ids], device=device), logits_to_keep=last + 1).logits[0, :-1]
        kept = torch.tensor(ids[len(ids) - last :], device=device)
        return logits.log_softmax(-1).gather(1, kept[:, None])[:, 0].cpu()

    @contextmanager
    def _adapted(self, adapter: Adapter | None, mask: torch.Tensor) -> Iterator[None]:
        def hook(pair: LoraPair) -> Any:
            a, b = pair.a.float().to(mask.device), pair.b.float().to(mask.device)
            return lambda module, args, output: output + mask * (args[0] @ a.T @ b.T) * pair.scaling

        handles = [
            self.model.get_submodule(name).register_forward_hook(hook(pair))
            for name, pair in (adapter.loras.items() if adapter else ())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def random_adapter(
    modules: dict[str, tuple[int, int]],
    base: BaseFingerprint,
    *,
    seed: int,
    rank: int = 8,
    method: str = "lorap",
    loud: float = 1.0,
) -> Adapter:
    """An adapter that changes answers a lot, for tests: a wrong method must not look like rounding."""
    generator = torch.Generator().manual_seed(seed)

    def pair(width: int, out: int) -> LoraPair:
        a = torch.randn(rank, width, generator=generator) * width**-0.5
        b = torch.randn(out, rank, generator=generator) * 0.3 * loud * rank**-0.5
        return LoraPair(a, b, scaling=2.0)

    return Adapter(method=method, base=base, loras={name: pair(*shape) for name, shape in modules.items()}, meta={})
