"""The loss and its gradients: equal to the plain way, and untouched by padding, batching, checkpointing, accumulation."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preft_cli.config.schema import AdapterConfig
from preft_cli.data import Row
from preft_cli.training.collate import Collator
from preft_cli.training.objective import LabelPositions, Objective
from tests.unit.test_training_mask import ROWS, adapted_model

CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def trained_on(
    batches: list[list[Row]], *, side: Literal["left", "right"] = "right", checkpointing: bool = False
) -> Any:
    """Loss sum and gradients of all `batches` together, from the same weights each time."""
    adapted = adapted_model()
    model = adapted.model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    objective = Objective(adapted)
    total = 0.0
    for batch in batches:
        loss = objective(Collator(side=side)(batch))
        loss.total.backward()
        total += loss.total.item()
    return total, gradients(model)


def assert_same(left: Any, right: Any) -> None:
    assert left[0] == pytest.approx(right[0], rel=1e-5)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in right[1].values())
    torch.testing.assert_close(left[1], right[1], **CLOSE)


ONE_BY_ONE = [[row] for row in ROWS]


def test_only_the_adapter_has_gradients() -> None:
    names = trained_on(ONE_BY_ONE)[1]
    assert names
    assert all("lora_" in name for name in names)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batch_composition(side: Literal["left", "right"]) -> None:
    assert_same(trained_on([ROWS], side=side), trained_on(ONE_BY_ONE))


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradient_checkpointing(side: Literal["left", "right"]) -> None:
    """The forward pass that is repeated during backward still meets the mask."""
    assert_same(trained_on([ROWS], side=side, checkpointing=True), trained_on(ONE_BY_ONE))


def test_checkpointing_does_repeat_the_forward_pass() -> None:
    """So that the test above could fail."""
    adapted, calls = adapted_model(), []
    model = adapted.model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default").register_forward_hook(
        lambda *_: calls.append(1)
    )
    Objective(adapted)(Collator()(ROWS)).total.backward()
    assert len(calls) == 2


def test_without_the_mask_the_gradients_differ() -> None:
    """So that the tests above could fail."""
    adapted = adapted_model(AdapterConfig(method="lora", rank=4, alpha=12))
    Objective(adapted)(Collator()(ROWS)).total.backward()
    masked = trained_on([ROWS])[1]
    assert max((gradients(adapted.model)[name] - masked[name]).abs().max() for name in masked) > 1e-2


def test_head_on_label_positions_equals_the_plain_way() -> None:
    batch = Collator()(ROWS)
    chosen = Objective(adapted_model())(batch)
    adapted = adapted_model()
    Objective(adapted)
    adapted.mask.set(batch["prompt_mask"])
    logits = adapted.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.shape == (*batch["input_ids"].shape, 320), "without a selection the head sees everything"
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(chosen.total, plain, **CLOSE)
    assert chosen.num_tokens == sum(len(row.completion_ids) for row in ROWS)


def test_head_sees_the_label_positions_alone() -> None:
    adapted, seen = adapted_model(), []
    objective = Objective(adapted)
    adapted.model.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape)))
    objective(Collator()(ROWS))
    assert seen == [(1, sum(len(row.completion_ids) for row in ROWS), 320)]


def test_selection_is_used_once() -> None:
    head, positions = nn.Linear(3, 5), LabelPositions()
    positions.attach(head)
    positions.select(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1]))
    assert head(torch.ones(2, 2, 3)).shape == (1, 3, 5), "a position may be asked for twice"
    assert head(torch.ones(2, 2, 3)).shape == (2, 2, 5)
