"""Rows in one sequence, with what they share computed once: the gradients of one unpacked row at a time, for every option.

The reference shares nothing with the training: a plain forward pass of a row with its own mask, all logits, its own loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from preft_cli.config.schema import AdapterConfig, Method
from preft_cli.data import Row
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training import objective as objective_module
from preft_cli.training.apart import Apart
from preft_cli.training.arrange import arrange, pack_all
from preft_cli.training.collate import Collator
from preft_cli.training.objective import Objective
from preft_cli.training.packed import Packed, attention_mask, pack
from preft_cli.training.session import load_base
from tests.unit.tiny import tiny_model

SYSTEM = [3, 40, 41, 42]
PROMPT = [*SYSTEM, 50, 51, 2, 52]
TURN_2 = [*PROMPT, 60, 61, 2, 70, 71]
TURN_3 = [*TURN_2, 62, 2, 72]
# Ids that stand on both sides of the boundary, an answer that is the next turn's prompt, equal answers, a lone row.
ROWS = [
    Row(TURN_2, [62, 2]),
    Row(PROMPT, [60, 61, 2]),
    Row([9], [9, 2]),
    Row(PROMPT, [63, 2]),
    Row(TURN_3, [64, 65, 66, 2]),
    Row([*SYSTEM, 80, 81, 82, 83, 84], [60, 61, 2]),
    Row(PROMPT, [63, 2]),
    Row([*SYSTEM, 80, 90], [2]),
]
METHODS: list[Method] = ["lorap", "direftp", "lorap+direftp", "lora", "direft"]
BATCHES = {
    "all": [ROWS],
    "one by one": [[row] for row in ROWS],
    "accumulated": [ROWS[:3], ROWS[3:4], ROWS[4:]],
}
LAYOUTS: dict[str, Callable[[list[Row]], Any]] = {
    "arranged": lambda rows: arrange(rows, 1.0),
    "packed": lambda rows: pack_all(rows, 24, share=True, seed=0),
    "one sequence": lambda rows: [list(rows)],
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def adapted_model(method: Method, base: Any = None, checkpointing: bool = False) -> AdaptedModel:
    """In float32, with an adapter that is no longer a no-op, so that all of its parameters have gradients."""
    torch.manual_seed(1)
    linear = [f"model.layers.{n}.{m}" for n in (0, 1) for m in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")]
    targets = {"lora": linear, "direft": ["model.layers.0.residual", "model.layers.1.residual"]}
    adapted = AdaptedModel(tiny_model() if base is None else base, AdapterConfig(method=method, rank=3), targets)
    for parameter in adapted.trainable().values():
        torch.nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        adapted.model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted


def trained_on(adapted: AdaptedModel, batches: list[Any], **options: Any) -> tuple[float, int, dict[str, Tensor]]:
    """Loss sum, number of tokens and gradients, all divided by the tokens of all batches, as in a step of the Trainer."""
    objective, collate = Objective(adapted), Collator(**{"share_prompts": True, **options})
    tokens = sum(len(row.completion_ids) for row in ROWS)
    total, seen = 0.0, 0
    for batch in map(collate, batches):
        loss = objective(batch)
        assert (batch["labels"][:, 1:] != -100).sum() == loss.num_tokens, "what the Trainer divides by"
        (loss.total / tokens).backward()
        total, seen = total + loss.total.item(), seen + loss.num_tokens
    return total, seen, {name: p.grad for name, p in adapted.trainable().items()}


def one_row_at_a_time(adapted: AdaptedModel, method: str) -> tuple[float, int, dict[str, Tensor]]:
    total = torch.zeros(())
    tokens = sum(len(row.completion_ids) for row in ROWS)
    for row in ROWS:
        n, ids = len(row.prompt_ids), torch.tensor([row.prompt_ids + row.completion_ids])
        if method.endswith("p"):
            adapted.mask.set(torch.arange(ids.shape[1])[None] < n)
        log_p = adapted.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        loss = -sum(log_p[n - 1 + i, token] for i, token in enumerate(row.completion_ids))
        (loss / tokens).backward()
        total = total + loss.detach()
    return total.item(), tokens, {name: p.grad for name, p in adapted.trainable().items()}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return {method: one_row_at_a_time(adapted_model(method), method) for method in METHODS}


def assert_equal(got: Any, expected: Any) -> None:
    assert got[:2] == (pytest.approx(expected[0], rel=1e-5), expected[1])
    assert all(gradient.abs().max() > 1e-4 for gradient in expected[2].values())
    torch.testing.assert_close(got[2], expected[2], **CLOSE)


@pytest.mark.parametrize(("side", "checkpointing"), [("right", False), ("left", False), ("right", True)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_the_reference(
    reference: Any, method: Method, layout: str, side: str, checkpointing: bool
) -> None:
    adapted = adapted_model(method, checkpointing=checkpointing)
    assert_equal(trained_on(adapted, [LAYOUTS[layout](ROWS)], side=side), reference[method])


@pytest.mark.parametrize("share", [False, True], ids=["", "share"])
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("method", ["lorap+direftp", "lora"])
def test_accumulation(reference: Any, method: Method, batches: str, share: bool) -> None:
    assert_equal(trained_on(adapted_model(method), BATCHES[batches], share_prompts=share), reference[method])


def test_packing_without_sharing(reference: Any) -> None:
    sequences = pack_all(ROWS, 40, share=False, seed=0)
    assert len(sequences) < len(ROWS)
    assert_equal(trained_on(adapted_model("lorap"), [sequences], share_prompts=False), reference["lorap"])


@pytest.mark.parametrize(
    "family", ["Gemma", "Granite", "Llama", "Mistral", "Olmo2", "Phi3", "Qwen2", "Qwen3", "SmolLM3"]
)
def test_every_family_that_is_said_to_keep_rows_apart(family: str) -> None:
    """Two targets only, whose names all of them have; a window that no row fills is full attention."""
    import transformers

    window = {"sliding_window": max(map(len, ROWS))} if family in ("Mistral", "Phi3") else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, pad_token_id=0, **window,
    )  # fmt: skip
    losses = []
    for batch in ([ROWS], [[row] for row in ROWS]):
        torch.manual_seed(0)
        base = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        targets = {"lora": ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]}
        adapted = AdaptedModel(base, AdapterConfig(rank=3), targets)
        for parameter in adapted.trainable().values():
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(0))
        losses.append(trained_on(adapted, [batch] if len(batch) == 1 else [[row] for row in batch], share_prompts=True))
    assert_equal(losses[0], losses[1])


def test_the_layouts_do_share() -> None:
    """So that the tests above could fail."""
    assert len(pack(ROWS)) == 42
    assert sum(map(len, ROWS)) == 88
    assert [len(sequence) for sequence in arrange(ROWS, 1e-3)] == [8]
    assert [len(sequence) for sequence in arrange(ROWS, 1.0)] == [3, 1, 1, 3]
    assert [len(sequence) for sequence in LAYOUTS["packed"](ROWS)] == [4, 2, 2]
    assert "seen_until" not in Collator()(ROWS)
    assert "seen_until" not in Collator(share_prompts=True, pair_cost=1.0)([Row([n] * 9, [2]) for n in (4, 5)])


def test_padding_and_neighbours_change_nothing() -> None:
    """Bit for bit the same completion, whatever its sequence holds at its side."""
    adapted, row = adapted_model("lorap"), Row(PROMPT, [60, 61, 2])

    def first_loss(other: Row, pad_id: int) -> float:
        objective = Objective(adapted)
        batch = Collator(pad_id=pad_id)([[row, other], [Row(list(range(10, 40)), [2])]])
        own = batch["labels"].clone()
        own[1:] = own[0, len(row) :] = -100
        return objective(batch | {"labels": own}).total.item()

    losses = {first_loss(Row([7, 8, n], [n, n]), pad) for n, pad in ((5, 0), (90, 2), (91, 300))}
    assert len(losses) == 1


def test_a_base_that_asks_for_eager_attention_keeps_rows_apart_too(tmp_path: Path) -> None:
    """Eager attention adds its mask to the scores, and true is 1: each row would see all that is before it."""
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "eager"}))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "eager"
    needed: Any = SimpleNamespace(
        base=SimpleNamespace(path=tmp_path), precision=SimpleNamespace(dtype=torch.float32), apart=Apart(True, False)
    )
    one, other = (adapted_model("lorap", load_base(needed, torch.device("cpu")).eval()) for _ in range(2))
    assert_equal(trained_on(one, [[ROWS]]), one_row_at_a_time(other, "lorap"))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_sees_itself_alone(side: Any) -> None:
    """Attention over nothing is 0 / 0. Where a kernel makes NaN of it, the next layer multiplies that with a weight of zero,
    and it is in every row: no loss on this machine's kernels, which make zeros, could tell."""
    batch = Collator(side=side)([[Row([5], [6, 7]), Row([8], [9])], [Row([5], [6])]])
    sees = attention_mask(batch["seen_until"])[1, 0]
    padding = batch["attention_mask"][1] == 0
    assert padding.sum() == 3
    torch.testing.assert_close(sees[padding], torch.eye(5, dtype=torch.bool)[padding])
    assert not sees[~padding][:, padding].any(), "and nobody sees padding"


def replaced(change: Callable[[Packed], dict[str, Tensor]]) -> Callable[..., Packed]:
    def faulty(rows: Any, *, share: bool = True) -> Packed:
        packed = pack(rows, share=share)
        return Packed(**(vars(packed) | change(packed)))

    return faulty


FAULTS: dict[str, Callable[[Packed], dict[str, Tensor]]] = {
    "rows see each other": lambda p: {"seen_until": torch.full_like(p.seen_until, len(p))},
    "columns for positions": lambda p: {"position_ids": torch.arange(len(p))},
    "adapted completions": lambda p: {"prompt_mask": torch.ones_like(p.prompt_mask)},
    "prompts end one early": lambda p: {"prompt_mask": p.prompt_mask & p.prompt_mask.roll(-1)},
    "the column before predicts": lambda p: {"predicted_by": torch.arange(len(p)) - 1},
    "the end sees too little": lambda p: {"seen_until": (p.seen_until - 2).maximum(torch.arange(len(p)) + 1)},
    "completions begin one late": lambda p: {"position_ids": p.position_ids + ~p.prompt_mask},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(reference: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr("preft_cli.training.collate.pack", replaced(FAULTS[fault]))
    with pytest.raises(AssertionError):
        assert_equal(trained_on(adapted_model("lorap"), [[ROWS]]), reference["lorap"])


def test_a_lost_mask_is_found(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own causal mask in place of ours."""
    monkeypatch.setattr(objective_module, "attention_mask", lambda seen: torch.ones_like(seen))
    with pytest.raises(AssertionError):
        assert_equal(trained_on(adapted_model("lorap"), [[ROWS]]), reference["lorap"])


def test_who_sees_whom() -> None:
    packed = pack([Row([1, 2], [9]), Row([1, 2, 3], [8, 7]), Row([4], [5])])
    assert packed.input_ids.tolist() == [1, 2, 9, 3, 8, 7, 4, 5]
    sees = attention_mask(packed.seen_until[None])[0, 0]
    assert ["".join(".x"[int(one)] for one in row) for row in sees] == [
        "x.......",
        "xx......",
        "xxx.....",
        "xx.x....",
        "xx.xx...",
        "xx.xxx..",
        "......x.",
        "......xx",
    ]
