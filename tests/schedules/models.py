"""The base models of the schedules, with the adapters that their names can stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine_patch.adapter import Adapter
from engine_patch.store.file import write_adapter
from preft_cli.models import BaseModel, resolve
from preft_cli.models.modules import modules_of
from tests.reference import MaskedReference, random_adapter

RANKS = (8, 4, 16, 8, 12, 8)
MIXED = ("lorap", "direftp", "lorap+direftp", "lora", "lora+direft", "direft")


@dataclass
class Material:
    """A model, its reference, and adapters with their files."""

    path: Path
    vocab: int
    reference: MaskedReference
    adapters: list[Adapter]
    files: list[Path]


def material(model: str, folder: Path, method: str | None = None) -> Material:
    """For `tiny` (a random Llama of two layers) or a model name that `model.base` takes.

    Adapters go to `folder`; all are of one `method`, or of all kinds.
    """
    base = tiny_llama(folder / "tiny") if model == "tiny" else resolve(model)
    modules, loud = modules_of(base), 1.0 if model != "tiny" else 2.0
    adapters = [
        random_adapter(modules, base.fingerprint, seed=index, rank=rank, method=method or own, loud=loud)
        for index, (rank, own) in enumerate(zip(RANKS, MIXED, strict=True))
    ]
    files = [folder / f"{index}.preft" for index in range(len(adapters))]
    for file, adapter in zip(files, adapters, strict=True):
        write_adapter(file, adapter)
    reference = MaskedReference(base.path, "cuda" if torch.cuda.is_available() else "cpu")
    return Material(base.path, reference.model.config.vocab_size, reference, adapters, files)


def tiny_llama(folder: Path) -> BaseModel:
    """A random Llama of two layers. Head size 32 is the least that the CPU's attention takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return BaseModel(str(folder), folder)
