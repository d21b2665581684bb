"""Where and in which precision to compute."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from preft_cli.config.schema import TrainConfig
from preft_cli.errors import UserError


@dataclass(frozen=True)
class Precision:
    """Compute type. The adapter's own weights and its optimizer state are float32 in every case."""

    device: str
    """cuda or cpu"""
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute in `dtype` inside this block."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype != torch.float32)


def choose_precision(dtype: str) -> Precision:
    """From `train.dtype`; auto is bfloat16 where the hardware computes in it, else float32.

    Raises:
        UserError: a type that this machine cannot train in.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if device == "cuda" else _cpu_has_bfloat16()
        return Precision(device, torch.bfloat16 if fast else torch.float32)
    if dtype == "float16" and device == "cpu":
        raise UserError("train.dtype: float16 needs a GPU; on a CPU use auto, float32 or bfloat16", exit_code=2)
    return Precision(device, getattr(torch, dtype))


def check_devices(train: TrainConfig) -> None:
    """One GPU for each process, where there are GPUs at all.

    Raises:
        UserError: there are fewer, or Accelerate was told to shard the model in its own way.
    """
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", train.num_processes)) > gpus:
        raise UserError(f"train.num_processes: {train.num_processes} processes need a GPU each; here are {gpus}", 2)
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true"):
            raise UserError(
                f"accelerate launch: leave {name} to preft: without that option, and train.parallel: fsdp", 2
            )


def _cpu_has_bfloat16() -> bool:
    """Without these instructions bfloat16 is emulated, and slower than float32."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16") or able.get("bf16"))
