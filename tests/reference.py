"""The reference that served answers are held against: a plain Hugging Face forward pass in float32 with the mask i < n.

Written without the training code and without the engine's: the update is added by hooks on the base model's linear layers,
straight from the formulas `y_i = W x_i + m_i scaling B A x_i` and `h_i <- h_i + m_i W2^T (W1 h_i + b)`, the latter on what
decoder blocks give out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.rule import parts
from preft_cli.models.modules import Modules


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

    @torch.no_grad()
    def next_logits(self, ids: list[int], adapter: Adapter | None, adapted: int) -> torch.Tensor:
        """Logits of the token behind `ids`, `[vocabulary]`, with positions below `adapted` adapted."""
        mask = torch.zeros(len(ids), 1, device=self.model.device)
        mask[:adapted] = 1
        with self._adapted(adapter, mask):
            logits: torch.Tensor = self.model(torch.tensor([ids], device=self.model.device), logits_to_keep=1).logits[
                0, -1
            ]
        return logits

    @torch.no_grad()
    def batch_logprobs(
        self, texts: list[tuple[list[int], list[int]]], adapter: Adapter | None, prompt_only: bool
    ) -> torch.Tensor:
        """All log-probabilities where the generated tokens of many (prompt, generated) were chosen, `[all of them, vocab]`."""
        ids = pad_sequence([torch.tensor(prompt + generated) for prompt, generated in texts], batch_first=True)
        at = torch.arange(ids.shape[1])
        n, end = (torch.tensor(lengths)[:, None] for lengths in zip(*map(_lengths, texts), strict=True))
        mask = (at < n if prompt_only else at < end)[:, :, None].float().to(self.model.device)
        with self._adapted(adapter, mask):  # what lies behind a text's end cannot be seen from within
            hidden = self.model.model(ids.to(self.model.device)).last_hidden_state
        return self.model.lm_head(hidden[(at >= n - 1) & (at < end - 1)]).log_softmax(-1)

    @contextmanager
    def _adapted(self, adapter: Adapter | None, mask: torch.Tensor) -> Iterator[None]:
        def lora(pair: LowRankPair) -> Any:
            a, b = pair.a.float().to(mask.device), pair.b.float().to(mask.device)
            return lambda module, args, output: output + mask * (args[0] @ a.T @ b.T) * pair.scaling

        def direft(pair: LowRankPair) -> Any:
            w1, w2, b = (t.float().to(mask.device) for t in (pair.a, pair.b.T, pair.bias) if t is not None)
            return lambda module, args, output: output + mask * ((output @ w1.T + b) @ w2)

        handles = [
            self.model.get_submodule(name.removesuffix(".residual")).register_forward_hook(
                direft(pair) if name.endswith(".residual") else lora(pair)
            )
            for name, pair in (adapter.pairs.items() if adapter else ())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _lengths(text: tuple[list[int], list[int]]) -> tuple[int, int]:
    """Of the prompt, and of both."""
    return len(text[0]), len(text[0]) + len(text[1])


def random_adapter(
    modules: Modules,
    base: BaseFingerprint,
    *,
    seed: int,
    rank: int = 8,
    method: str = "lorap",
    loud: float = 1.0,
) -> Adapter:
    """An adapter that changes answers a lot, for tests: a wrong method must not look like rounding."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def lora(width: int, out: int) -> LowRankPair:
        return LowRankPair(randn(rank, width) * width**-0.5, randn(out, rank) * 0.3 * loud * rank**-0.5, scaling=2.0)

    def direft(width: int, out: int) -> LowRankPair:
        w1, w2 = randn(rank, width) * width**-0.5, randn(out, rank) * 0.3 * loud * rank**-0.5
        return LowRankPair(w1, w2, scaling=1.0, bias=randn(rank))

    pairs: dict[str, LowRankPair] = {}
    if "lora" in parts(method):
        pairs |= {name: lora(*shape) for name, shape in modules.linear.items()}
    if "direft" in parts(method):
        pairs |= {name: direft(*shape) for name, shape in modules.streams.items()}
    return Adapter(method=method, base=base, pairs=pairs, meta={})
