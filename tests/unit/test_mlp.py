"""Gated MLPs: which are replaced, and that the replacement computes what vLLM's module would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from engine_patch.pool import mlp


class UnquantizedLinearMethod:
    pass


class Base(nn.Module):
    def __init__(self, size_in: int, size_out: int, method: Any) -> None:
        super().__init__()
        self.weight, self.quant_method = nn.Parameter(torch.randn(size_out, size_in)), method

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class Punica:
    """Adapters that add 1 to gate and up."""

    def add_lora_silu_and_mul(self, gate_up: torch.Tensor, x: torch.Tensor, stacked: Any) -> torch.Tensor:
        assert stacked == ("key",)
        gate, up = (gate_up + 1).chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class Wrapped(nn.Module):
    """As vLLM's LoRA layers are: the base layer, and then what the adapters add."""

    def __init__(self, base: Base, add: float) -> None:
        super().__init__()
        self.base_layer, self.add, self.punica_wrapper = base, add, Punica()
        self.lora_a_stacked = ("key",)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.base_layer(x)[0] + self.add, None


class LlamaMLP(nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.gate_up_proj: nn.Module = Wrapped(Base(4, 12, method), 1.0)
        self.down_proj: nn.Module = Wrapped(Base(6, 4, method), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)[0]


LlamaMLP.__module__ = "vllm.model_executor.models.llama"


class OtherMLP(LlamaMLP):
    pass


def of_transformers() -> nn.Module:
    """A class of the same name, whose layers are others."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP as Same

    return Same(LlamaConfig(hidden_size=4, intermediate_size=6, num_attention_heads=1))


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.mlp = inner


def model(inner: nn.Module) -> nn.Module:
    found = nn.Module()
    found.layers = nn.ModuleList([Layer(inner)])
    return found


def test_a_gated_mlp_computes_the_same_with_its_adapters_in_the_activation() -> None:
    found = model(LlamaMLP(UnquantizedLinearMethod()))
    names, x = list(found.state_dict()), torch.randn(3, 4)
    (layer,) = found.layers
    expected = layer.mlp(x)
    assert mlp.replace_mlps(found) == 1
    assert type(layer.mlp) is mlp.AdaptedMLP
    assert torch.allclose(layer.mlp(x), expected, atol=1e-5)
    assert list(found.state_dict()) == names  # so weights can be loaded anew


def unwrapped() -> nn.Module:
    found = LlamaMLP(UnquantizedLinearMethod())
    found.gate_up_proj = found.gate_up_proj.base_layer
    return found


def quantised_down() -> nn.Module:
    found = LlamaMLP(UnquantizedLinearMethod())
    found.down_proj.base_layer.quant_method = object()
    return found


@pytest.mark.parametrize(
    "inner",
    [
        lambda: OtherMLP(UnquantizedLinearMethod()),
        lambda: LlamaMLP(object()),
        unwrapped,
        quantised_down,
        of_transformers,
    ],
    ids=["another class", "quantised", "no adapters", "quantised behind", "transformers"],
)
def test_others_stay(inner: Any) -> None:
    made = inner()
    assert mlp.replace_mlps(model(made)) == 0


def test_a_class_that_was_changed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_patch import contract
    from engine_patch.errors import PreftError

    (first, *_) = contract.MLP_SYMBOLS
    monkeypatch.setattr(contract, "MLP_SYMBOLS", (contract.Symbol(first.module, first.name, "0" * 16, "test"),))
    with pytest.raises(PreftError, match=r"differ from what was tested: .*LlamaMLP\.forward"):
        mlp.replace_mlps(model(LlamaMLP(UnquantizedLinearMethod())))
