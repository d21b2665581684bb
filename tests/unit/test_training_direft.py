"""DiReFT in training: it computes the formula, starts as a no-op, and has the same gradients whatever surrounds a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preft_cli.config.schema import AdapterConfig
from preft_cli.errors import UserError
from preft_cli.methods.adapted import STATE, AdaptedModel
from preft_cli.methods.direftp.blocks import _intervene
from preft_cli.methods.direftp.intervention import Intervention
from preft_cli.training.collate import Collator
from preft_cli.training.objective import Objective
from tests.unit.test_training_mask import ROWS, logits
from tests.unit.test_training_objective import ONE_BY_ONE, assert_same, gradients
from tests.unit.tiny import tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "direftp": {"method": "direftp"},
    "direft": {"method": "direft"},
    "orthogonal": {"method": "direftp", "orthogonal": True},
    "both": {"method": "lorap+direftp", "alpha": 12, "direft_rank": 3},
    "both everywhere": {"method": "lora+direft", "alpha": 12, "orthogonal": True},
}
LINEAR = [f"model.layers.{n}.{m}" for n in (0, 1) for m in ("self_attn.q_proj", "mlp.down_proj")]


def adapted_model(
    variant: str, *, trained: bool = True, base: Any = None, layers: tuple[int, ...] = (0, 1), **settings: Any
) -> AdaptedModel:
    config = AdapterConfig(**{"rank": 4, **VARIANTS[variant], **settings})
    torch.manual_seed(1)
    targets = {"lora": LINEAR, "direft": [f"model.layers.{n}.residual" for n in layers]}
    adapted = AdaptedModel(tiny_model() if base is None else base, config, targets)
    if trained:
        for name, parameter in adapted.trainable().items():
            if "lora_A" not in name and "parametrizations" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return adapted


def small(family: str) -> Any:
    """A random model of another family."""
    import transformers

    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.1,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@torch.no_grad()
def by_hand(adapted: AdaptedModel, base: Any, ids: list[int], num_adapted: int, scaling: float = 3.0) -> Tensor:
    """Logits `[tokens, vocabulary]`: layer after layer of an untouched `base`, the formulas written out."""
    m = (torch.arange(len(ids)) < num_adapted).float()[:, None]
    weights = {name: p.detach() for name, p in adapted.model.named_parameters()}
    for name, module in base.named_modules():
        a, b = (weights.get(f"base_model.model.{name}.lora_{half}.default.weight") for half in "AB")
        if a is not None and b is not None:
            update = lambda _, args, out, a=a, b=b: out + m * scaling * (args[0] @ a.T @ b.T)  # noqa: E731
            module.register_forward_hook(update)
    h = base.model.embed_tokens(torch.tensor([ids]))
    positions = torch.arange(len(ids))[None]
    rotations = base.model.rotary_emb(h, position_ids=positions)
    for number, layer in enumerate(base.model.layers):
        h = layer(h, attention_mask=None, position_ids=positions, position_embeddings=rotations)
        if (pair := adapted.pairs().get(f"model.layers.{number}.residual")) is not None:
            w1, w2, bias = pair.a, pair.b.T, pair.bias
            h = h + m * ((h @ w1.T + bias) @ w2)
    return base.lm_head(base.model.norm(h))[0]


def masked_logits(adapted: AdaptedModel, row: Any, num_adapted: int) -> Tensor:
    adapted.mask.set(torch.arange(len(row))[None] < num_adapted)
    return logits(adapted.model, row)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_forward_pass_by_hand(variant: str) -> None:
    for row in ROWS:
        adapted, ids, n = adapted_model(variant), row.prompt_ids + row.completion_ids, len(row.prompt_ids)
        got = masked_logits(adapted, row, n)
        n = n if VARIANTS[variant]["method"].endswith("p") else len(row)
        expected = by_hand(adapted, tiny_model(), ids, n)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        other = by_hand(adapted, tiny_model(), ids, 0)
        assert (got - other).abs().max() > 1e-2, "nothing is adapted"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_family(family: str) -> None:
    row = ROWS[2]
    adapted = adapted_model("direftp", base=small(family), layers=(1,))
    got = masked_logits(adapted, row, 7)
    expected = by_hand(adapted, small(family), row.prompt_ids + row.completion_ids, 7)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert list(adapted.pairs()) == ["model.layers.1.residual"]


def test_blocks_that_return_a_tuple() -> None:
    block = torch.nn.Module()
    block.residual = Intervention(8, 2, orthogonal=False, dropout=0.0)
    torch.nn.init.normal_(block.residual.w2)
    h = torch.randn(1, 3, 8)
    changed, weights = _intervene(block, (), (h, "attention"))
    assert weights == "attention"
    torch.testing.assert_close(changed, _intervene(block, (), h))
    assert (changed - h).abs().max() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_starts_as_a_no_op(variant: str) -> None:
    row = ROWS[0]
    for n in (0, 4, len(row)):
        got = masked_logits(adapted_model(variant, trained=False), row, n)
        torch.testing.assert_close(got, logits(tiny_model(), row), atol=0, rtol=0)


@pytest.mark.parametrize("variant", ["direftp", "both"])
def test_disabled_is_the_base_model(variant: str) -> None:
    adapted, row = adapted_model(variant), ROWS[0]
    before = masked_logits(adapted, row, 4)
    with adapted.disabled():
        torch.testing.assert_close(masked_logits(adapted, row, 4), logits(tiny_model(), row), atol=0, rtol=0)
    torch.testing.assert_close(masked_logits(adapted, row, 4), before, atol=0, rtol=0)
    assert len(adapted.trainable()) == {"direftp": 6, "both": 14}[variant]


def test_a_forward_pass_without_a_mask_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no prompt mask is set"):
        logits(adapted_model("direftp").model, ROWS[0])


def trained_on(variant: str, batches: list[Any], *, side: Any = "right", checkpointing: bool = False) -> Any:
    adapted = adapted_model(variant)
    model = adapted.model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    objective, total = Objective(adapted), 0.0
    for batch in batches:
        loss = objective(Collator(side=side)(batch))
        loss.total.backward()
        total += loss.total.item()
    return total, gradients(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_one_row_at_a_time(variant: str) -> None:
    """Packed with others, padded on either side, computed twice."""
    alone = trained_on(variant, ONE_BY_ONE)
    for side in ("left", "right"):
        for checkpointing in (False, True):
            assert_same(trained_on(variant, [ROWS], side=side, checkpointing=checkpointing), alone)


def test_checkpointing_repeats_the_intervention() -> None:
    """So that the test above could fail."""
    adapted, calls = adapted_model("direftp"), []
    adapted.model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # In front: the repetition ends where the last tensor that backward needs is there again, within the intervention.
    adapted.model.get_submodule("model.layers.0.residual").register_forward_pre_hook(lambda *_: calls.append(1))
    Objective(adapted)(Collator()(ROWS)).total.backward()
    assert len(calls) == 2


def test_only_the_adapter_has_gradients() -> None:
    names = trained_on("both", ONE_BY_ONE)[1]
    assert {name.rpartition("layers.")[2][2:].partition(".")[0] for name in names} == {"self_attn", "mlp", "residual"}
    assert all("lora_" in name or ".residual." in name for name in names)


def test_rows_stay_orthonormal() -> None:
    adapted = adapted_model("orthogonal")
    objective = Objective(adapted)
    before = adapted.pairs()["model.layers.0.residual"].b
    optimizer = torch.optim.AdamW(adapted.trainable().values(), lr=0.05, weight_decay=0.0)
    for _ in range(10):
        optimizer.zero_grad()
        objective(Collator()(ROWS)).total.backward()
        optimizer.step()
    for pair in adapted.pairs().values():
        torch.testing.assert_close(pair.b.T @ pair.b, torch.eye(4), atol=1e-5, rtol=0)
    assert (adapted.pairs()["model.layers.0.residual"].b - before).abs().max() > 1e-2, "W2 is trained"


def test_dropout_acts_while_training_only() -> None:
    adapted = adapted_model("direftp", dropout=0.5)
    adapted.mask.set(torch.ones(1, 7))
    first, second = (logits(adapted.model.train(), ROWS[0]) for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    first, second = (logits(adapted.model.eval(), ROWS[0]) for _ in range(2))
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    torch.testing.assert_close(first, logits(adapted_model("direft").model, ROWS[0]))


@pytest.mark.parametrize("variant", ["orthogonal", "both"])
def test_half_precision_computes_beside_float32_parameters(variant: str) -> None:
    adapted = adapted_model(variant, base=tiny_model().bfloat16())
    seen = []
    block = adapted.model.get_submodule(("base_model.model." if variant == "both" else "") + "model.layers.0")
    block.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Objective(adapted)(Collator()(ROWS)).total.backward()
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in adapted.trainable().values()} == {torch.float32}
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().max() > 0 for p in adapted.trainable().values())
    if variant == "orthogonal":
        w2 = adapted.pairs()["model.layers.0.residual"].b
        torch.testing.assert_close(w2.T @ w2, torch.eye(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_comes_back_to_the_last_bit(variant: str, tmp_path: Path) -> None:
    adapted, fresh = adapted_model(variant), adapted_model(variant, trained=False)
    adapted.save_state(tmp_path)
    fresh.load_state(tmp_path)
    for name, parameter in adapted.trainable().items():
        assert torch.equal(parameter, fresh.trainable()[name])
    for name, pair in adapted.pairs().items():
        assert torch.equal(pair.b, fresh.pairs()[name].b)


def test_state_that_does_not_fit(tmp_path: Path) -> None:
    adapted = adapted_model("direftp")
    with pytest.raises(UserError, match=f"{STATE} is missing, so that run cannot be continued"):
        adapted.load_state(tmp_path)
    adapted_model("direftp", rank=2).save_state(tmp_path)
    with pytest.raises(UserError, match="does not hold the parameters of this run"):
        adapted.load_state(tmp_path)
    (tmp_path / STATE).write_bytes(b"half")
    with pytest.raises(UserError, match="truncated or damaged"):
        adapted.load_state(tmp_path)
