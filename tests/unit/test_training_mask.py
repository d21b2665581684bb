"""The prompt mask computes the formula, whatever surrounds a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from preft_cli.config.schema import AdapterConfig
from preft_cli.data import Row
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.methods.lorap.layers import LoraLayers
from preft_cli.methods.mask import PromptMask
from preft_cli.training.collate import Collator
from preft_cli.training.objective import Objective
from tests.unit.tiny import tiny_model

# The same ids on both sides of the boundary, EOS (= padding) in the middle of prompts: values must not matter.
ROWS = [
    Row([5, 2, 2, 7], [7, 5, 2]),
    Row([9], [2]),
    Row([11, 12, 13, 14, 15, 16, 17], [5, 5, 5, 5, 2]),
]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted_model(config: AdapterConfig | None = None, *, trained: bool = True) -> AdaptedModel:
    config = config or AdapterConfig(rank=4, alpha=12)
    names = [f"model.layers.{n}.{m}" for n in (0, 1) for m in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]
    torch.manual_seed(1)
    adapted = AdaptedModel(tiny_model(), config, {"lora": names})
    if trained:
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return adapted


def masked(adapted: AdaptedModel, mask_BT: Tensor) -> Any:
    adapted.mask.set(mask_BT)
    return adapted.model


def logits(model: Any, row: Row) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([row.prompt_ids + row.completion_ids])).logits[0]


def reference(model: Any, row: Row, num_adapted: int, scaling: float) -> Tensor:
    """The base model with `m_i scaling B A x_i` added by hooks of the test's own; PEFT takes no part."""
    base = tiny_model()
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    m = (torch.arange(ids.shape[1]) < num_adapted).float()[:, None]
    weights = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    for name, module in base.named_modules():
        key = f"base_model.model.{name}.lora_A.default.weight"
        if key in weights:
            a, b = weights[key], weights[key.replace("lora_A", "lora_B")]
            module.register_forward_hook(
                lambda _, args, out, a=a, b=b: out + m * scaling * torch.einsum("or,ri,bti->bto", b, a, args[0])
            )
    with torch.no_grad():
        return base(input_ids=ids).logits[0]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 3.0), (True, 6.0)])
def test_equals_the_formula(row: Row, use_rslora: bool, scaling: float) -> None:
    adapted = adapted_model(AdapterConfig(rank=4, alpha=12, use_rslora=use_rslora))
    model, n = adapted.model, len(row.prompt_ids)
    got = logits(masked(adapted, torch.arange(len(row))[None] < n), row)
    torch.testing.assert_close(got, reference(model, row, n, scaling), atol=1e-5, rtol=1e-5)
    everywhere = reference(model, row, len(row), scaling)
    assert (got[n:] - everywhere[n:]).abs().max() > 1e-2, "the completion is adapted"


def test_starts_as_a_no_op() -> None:
    adapted = adapted_model(trained=False)
    for mask_BT in (torch.ones(1, len(ROWS[0])), torch.zeros(1, len(ROWS[0]))):
        torch.testing.assert_close(
            logits(masked(adapted, mask_BT), ROWS[0]), logits(tiny_model(), ROWS[0]), atol=0, rtol=0
        )


def test_mask_of_zeros_is_the_base_model_and_ones_is_plain_lora() -> None:
    row = ROWS[0]
    lora = logits(adapted_model(AdapterConfig(method="lora", rank=4, alpha=12)).model, row)
    torch.testing.assert_close(logits(masked(adapted_model(), torch.ones(1, len(row))), row), lora, atol=0, rtol=0)
    off = logits(masked(adapted_model(), torch.zeros(1, len(row))), row)
    torch.testing.assert_close(off, logits(tiny_model(), row), atol=1e-6, rtol=1e-6)
    assert (lora - off).abs().max() > 1e-2


@pytest.mark.parametrize("method", ["lora", "lorap"])
def test_method_decides_who_is_masked(method: Any) -> None:
    """`lora` leaves PEFT's forward pass alone; `lorap` masks it."""
    adapted, row = adapted_model(AdapterConfig(method=method, rank=4, alpha=12)), ROWS[0]
    objective = Objective(adapted)
    num_adapted = len(row) if method == "lora" else len(row.prompt_ids)
    expected = reference(adapted.model, row, num_adapted, 3.0).log_softmax(-1)
    first = len(row.prompt_ids) - 1
    wanted = -sum(expected[first + i, token] for i, token in enumerate(row.completion_ids))
    torch.testing.assert_close(objective(Collator()([row])).total, wanted, atol=1e-4, rtol=1e-5)


def test_autocast_makes_no_copies_of_inputs() -> None:
    """And the gradients are those of PEFT's own way, to the last bit."""
    found = []
    for peft_way in (False, True):
        adapted = adapted_model()
        adapted.model.get_base_model().to(torch.bfloat16)
        seen: set[torch.dtype] = set()
        for module in adapted.model.modules():
            if hasattr(module, "lora_A"):
                module.lora_A.float(), module.lora_B.float()
                module.lora_A.default.register_forward_pre_hook(lambda _, args, seen=seen: seen.add(args[0].dtype))
                if peft_way:
                    del module._cast_input_dtype
        with torch.autocast("cpu", dtype=torch.bfloat16):
            Objective(adapted)(Collator()(ROWS)).total.backward()
        found.append((seen, {name: p.grad for name, p in adapted.trainable().items()}))
    assert [seen for seen, _ in found] == [{torch.bfloat16}, {torch.float32}]
    torch.testing.assert_close(found[0][1], found[1][1], atol=0, rtol=0)


def test_a_forward_pass_without_a_fitting_mask_is_refused() -> None:
    adapted = adapted_model()
    with pytest.raises(RuntimeError, match="no prompt mask is set"):
        logits(adapted.model, ROWS[0])
    with pytest.raises(RuntimeError, match=r"batch of shape \[1, 7\]"):
        logits(masked(adapted, torch.ones(1, 3)), ROWS[0])


def test_lora_that_the_mask_cannot_stand_in_front_of_is_refused() -> None:
    """An embedding's LoRA has no lora_A layer: it would act on all tokens in silence."""
    layers = LoraLayers(tiny_model(), AdapterConfig(rank=4), ["model.embed_tokens"])
    with pytest.raises(ValueError, match="no lora_A linear layer"):
        layers.mask(PromptMask())


def test_mask_goes_by_position() -> None:
    for side in ("left", "right"):
        batch = Collator(pad_id=2, side=side)(ROWS)
        adapted = [row["ids"][row["mask"]].tolist() for row in _split(batch)]
        assert adapted == [row.prompt_ids for row in ROWS]


def _split(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{"ids": ids, "mask": mask} for ids, mask in zip(batch["input_ids"], batch["prompt_mask"], strict=True)]
