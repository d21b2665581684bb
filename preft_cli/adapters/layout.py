"""File names of adapter folders. No torch here: plans look at names only."""

from __future__ import annotations

TRAINED_CONFIG = "preft_config.json"
TRAINED_WEIGHTS = "preft_adapter.safetensors"

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_BIN = "adapter_model.bin"
PEFT_INDEX = "adapter_model.safetensors.index.json"
PEFT_BIN_INDEX = "adapter_model.bin.index.json"

PYREFT_CONFIG = "config.json"
PYREFT_PREFIX = "intkey_"
# Base parameters that were trained beside the interventions, in each form that transformers writes.
PYREFT_MODEL = "pytorch_model.bin"
PYREFT_MODEL_SAFE = "model.safetensors"
PYREFT_MODEL_INDEXES = ("pytorch_model.bin.index.json", "model.safetensors.index.json")
# The folder that pyreft's trainer puts into its output folder and into each checkpoint.
PYREFT_CHECKPOINT = "intervenable_model"

# A prefill-only adapter in PEFT's form. Stock loaders look for the names above, and one of them takes any
# `*.safetensors` beside an `adapter_config.json`: neither name may be theirs, or they would apply it to all tokens.
PREFILL_CONFIG = "lorap_adapter_config.json"
PREFILL_WEIGHTS = "lorap_adapter_model.safetensors"
