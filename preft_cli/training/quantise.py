"""`train.quantize_base`: a base model in 8 or 4 bits, by bitsandbytes. The adapter on it stays float32."""

from __future__ import annotations

import logging
from typing import Any

import torch

from preft_cli.errors import UserError
from preft_cli.training.device import Precision


def check_quantised(bits: str | None) -> None:
    """Refuse what could only fail when the weights are loaded.

    Raises:
        UserError: bitsandbytes does not work here.
    """
    if bits is None:
        return
    try:
        import bitsandbytes

        works = torch.cuda.is_available() or "cpu" in getattr(bitsandbytes, "supported_torch_devices", ())
    except Exception as error:  # it loads a compiled library for the driver that it finds
        raise UserError(f"train.quantize_base: bitsandbytes cannot be loaded: {error}") from error
    if not works:
        raise UserError(
            "train.quantize_base: this machine has no GPU, and this bitsandbytes has no code for CPUs: "
            "pip install 'bitsandbytes>=0.46', or leave train.quantize_base out",
            exit_code=2,
        )


def quantised(bits: str | None, precision: Precision) -> dict[str, Any]:
    """Options of `from_pretrained`: NF4 as in QLoRA (arXiv 2305.14314), or LLM.int8 (arXiv 2208.07339)."""
    if bits is None:
        return {}
    from transformers import BitsAndBytesConfig

    if bits == "8bit":
        # It says in each layer of each step that it computes in float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    four = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision.dtype,
    )
    return {"quantization_config": four}
