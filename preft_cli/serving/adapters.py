"""Which adapters of a folder this server can answer for exactly, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from preft_cli.errors import UserError

if TYPE_CHECKING:
    from preft_cli.convert.collect import Collected
    from preft_cli.models import BaseModel

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The limits that vLLM's LoRA can be started with."""


class Served(NamedTuple):
    """What the server starts with."""

    adapters: dict[str, Path]
    """The `.preft` file by model name."""
    rejected: list[tuple[Path, str]]
    """What is left out, each with its reason."""
    max_lora_rank: int
    """The rank limit of the engine: the smallest of vLLM's that holds all of them."""
    template_digest: str | None
    """Of the chat template that the server uses."""


def choose(collected: Collected, max_lora_rank: int | None, template_digest: str | None) -> Served:
    """Take those that fit.

    Args:
        collected: the readable adapters of the folder that belong to the base model.
        max_lora_rank: the limit that the config sets; None for the largest rank in the folder.
        template_digest: of the chat template that the server uses; None where there is none.
    """
    ranks = {name: header.rank for name, header in collected.headers.items()}
    wanted = max_lora_rank or max(ranks.values(), default=16)
    limit = next((rank for rank in LORA_RANKS if rank >= wanted), LORA_RANKS[-1])
    served = Served({}, list(collected.rejected), limit, template_digest)
    for name, path in collected.adapters.items():
        trained_with = collected.headers[name].meta.get("chat_template_digest")
        if ranks[name] > limit:
            served.rejected.append((path, f"rank {ranks[name]}: this server holds up to {limit} (serve.max_lora_rank)"))
        elif trained_with and trained_with != template_digest:
            served.rejected.append(
                (path, "trained with another chat template than this server uses; set model.chat_template to that one")
            )
        else:
            served.adapters[name] = path
    return served


def template_digest(base: BaseModel, file: Path | None) -> str | None:
    """Digest of the chat template that the server will use: `file`, else the tokenizer's own.

    Raises:
        UserError: `file` cannot be read.
    """
    from transformers import AutoTokenizer

    from preft_cli.data.template import load_template

    if not base.random:
        return load_template(AutoTokenizer.from_pretrained(base.path), base.path, file).digest
    if file:
        raise UserError("model.chat_template: random weights have no tokenizer to use it with", exit_code=2)
    return None
