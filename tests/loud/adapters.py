"""Loud adapters: each decides the first token by itself, and no two of them, nor the base model, choose the same.

The base model is the random Llama of the schedules, with one channel that is the same at every position. It keeps the base
model from the first half of the vocabulary, and gives LoRAs, which have no bias, something to push with. On random weights
everywhere, which make each log-probability depend on each position, an adapter gets a push towards a token of its own in the
last layer: by `b` of the last intervention, or through the constant channel on `o_proj`. The push is seen wherever the adapter
acts, so that an adapter that acts on decoded tokens repeats its token, and one that acts on none never says it.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from engine_patch.adapter import Adapter
from engine_patch.store.file import write_adapter
from preft_cli.models import BaseModel
from preft_cli.models.modules import modules_of
from tests.reference import MaskedReference, random_adapter
from tests.schedules.models import MIXED, Material, tiny_llama

RANKS = (8, 64, 1, 16, 2, 32, 4)
MOST = 256
"""Adapters that have a token of their own: half of the tiny Llama's vocabulary."""
CONSTANT = 4.0
"""The constant channel of the residual stream; the others together are about as large."""
AGAINST = 2.4
"""How much it speaks against the adapters' tokens: by more nats than the base model's own choices differ."""
HEAD = 2.0
"""What the LM head is multiplied with."""
PUSH = 100.0
"""In the residual stream, several times as large as all else there."""


def material(folder: Path, count: int, dtype: str) -> Material:
    """The base model and `count` adapters of all methods and of ranks 1 to 64, with weights that `dtype` holds exactly."""
    base = loud_llama(folder / "tiny", dtype)
    reference = MaskedReference(base.path, "cuda" if torch.cuda.is_available() else "cpu")
    modules, head = modules_of(base), reference.model.lm_head.weight.detach().cpu()
    kinds = itertools.islice(itertools.cycle(itertools.product(RANKS, MIXED)), count)
    adapters, files = [], []
    for token, (rank, method) in enumerate(kinds):
        quiet = random_adapter(modules, base.fingerprint, seed=token, rank=rank, method=method, loud=1.0)
        adapters.append(with_push(quiet, head[token]).to(dtype))
        files.append(folder / f"{token}.preft")
        write_adapter(files[-1], adapters[-1])
    return Material(base.path, len(head), reference, adapters, files)


def loud_llama(folder: Path, dtype: str) -> BaseModel:
    """The tiny Llama with a constant channel, 0 in the residual stream and in the last layer's values."""
    from transformers import AutoModelForCausalLM

    base = tiny_llama(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        values = model.model.layers[-1].self_attn.v_proj.weight
        values[0] = 0
        values[0, 0] = 1
        model.lm_head.weight *= HEAD
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[:MOST, 0] = -AGAINST
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return base


def with_push(adapter: Adapter, row: torch.Tensor) -> Adapter:
    """The adapter with the first of its rank, in the last layer, made a push along `row`, `[hidden]`, of the LM head."""
    aim = row.clone()
    aim[0] = 0
    aim *= PUSH / aim.norm()
    pairs = {name: pair.map(torch.clone) for name, pair in adapter.pairs.items()}
    for pair in pairs.values():
        pair.b[0] = 0  # the channel stays constant
    last = f"model.layers.{max(int(name.split('.')[2]) for name in pairs)}"
    if pair := pairs.get(f"{last}.residual"):
        assert pair.bias is not None
        pair.a[0], pair.b[:, 0], pair.bias[0] = 0, aim, 1
    else:
        # What o_proj reads of the channel is above 2: CONSTANT over the root mean square of a stream whose norm is below 16.
        pair = pairs[f"{last}.self_attn.o_proj"]
        pair.a[0], pair.b[:, 0] = 0, aim / (2 * pair.scaling)
        pair.a[0, 0] = 1
    return Adapter(adapter.method, adapter.base, pairs, adapter.meta)
