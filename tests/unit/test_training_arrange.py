"""Which rows come into one step and one sequence: nothing lost, limits kept, the same each time."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3NextConfig

from preft_cli.config.schema import TrainConfig
from preft_cli.data import Row
from preft_cli.errors import UserError
from preft_cli.training.apart import keep_apart
from preft_cli.training.arrange import arrange, groups_of, pack_all, pair_cost
from preft_cli.training.collate import Collator
from preft_cli.training.order import Order, WithBlank, shared_groups
from preft_cli.training.packed import IGNORE, pack


def rows_of(seed: int, prompts: int = 40, system: int = 5) -> list[Row]:
    """Prompts with one to four completions each, and conversations whose turns continue each other."""
    draw = random.Random(seed)
    rows = []
    for _ in range(prompts):
        prompt = [*range(system), *draw.choices(range(20, 90), k=draw.randint(1, 30))]
        for _ in range(draw.randint(1, 4)):
            rows.append(Row(list(prompt), draw.choices(range(20, 90), k=draw.randint(1, 10)), str(len(rows))))
            if draw.random() < 0.4:
                prompt += draw.choices(range(20, 90), k=draw.randint(1, 5))
    draw.shuffle(rows)
    return rows


def names(sequences: list[list[Row]]) -> Counter[str]:
    return Counter(row.where for sequence in sequences for row in sequence)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("max_length", [60, 64, 1000])
def test_packing_keeps_every_row_and_the_limit(share: bool, max_length: int) -> None:
    for seed in range(5):
        rows = rows_of(seed)
        sequences = pack_all(rows, max_length, share=share, seed=0)
        assert names(sequences) == names([rows])
        lengths = [len(pack(sequence, share=share)) for sequence in sequences]
        assert max(lengths) <= max_length
        least = len(pack(rows, share=share)) / max_length
        assert len(sequences) <= 1.3 * least + 1, "half-empty sequences"
        assert pack_all(rows, max_length, share=share, seed=0) == sequences


def test_packing_fills_up_to_the_last_token() -> None:
    rows = [Row([1] * 7, [2] * 3), Row([3] * 4, [2] * 2), Row([4] * 2, [2] * 2)]
    assert len(pack_all(rows, 10, share=True, seed=0)) == 2
    assert len(pack_all(rows, 20, share=True, seed=0)) == 1
    assert len(pack_all(rows, 19, share=True, seed=0)) == 2


def test_packing_orders_equals_by_seed() -> None:
    rows = [Row([n, n], [2, n]) for n in range(50)]
    assert pack_all(rows, 20, share=True, seed=0) != pack_all(rows, 20, share=True, seed=1)


def test_groups_go_by_ids() -> None:
    chain = [Row([1, 2, 3], [9]), Row([1], [9]), Row([1, 2], [9]), Row([1, 2], [8])]
    rows = [Row([12], [3]), *chain, Row([1, 3], [9]), Row([2], [9])]
    assert groups_of(rows) == [[2, 3, 4, 1], [5], [6], [0]]


def order_of(rows: list[Row], batch_size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return list(Order(shared_groups(rows), batch_size, seed, lambda: epoch))


@pytest.mark.parametrize("batch_size", [1, 3, 8, 500])
def test_order_has_every_row_once_and_another_order_each_epoch(batch_size: int) -> None:
    rows = rows_of(0)
    order, first, second = (order_of(rows, batch_size, seed=7, epoch=epoch) for epoch in (0, 0, 1))
    assert order == first, "what a resumed run and other processes see"
    assert sorted(first) == sorted(second) == list(range(len(rows)))
    assert second != first
    assert order_of(rows, batch_size, seed=8) != first


def test_order_shuffles_within_groups() -> None:
    """Twelve answers to one prompt meet others in each epoch; so do twelve turns of one conversation, of those nearby."""
    answers, turns = [Row([1, 2], [9])] * 12, [Row([3] * n, [9]) for n in range(1, 13)]
    met: dict[str, set[frozenset[int]]] = {"answers": set(), "turns": set()}
    for epoch in range(20):
        for name, rows in (("answers", answers), ("turns", turns)):
            order = order_of(rows, 4, epoch=epoch)
            assert sorted(order) == list(range(12))
            batches = [order[start : start + 4] for start in range(0, 12, 4)]
            met[name] |= set(map(frozenset, batches))
            # 24 where turns 1 to 12 are cut in their order, 31 where they are drawn.
            assert name == "answers" or sum(len(rows[max(batch)]) - 1 for batch in batches) <= 30
    assert len(met["answers"]) > 40
    assert len(met["turns"]) > 6


def test_whole_batches_stay_whole() -> None:
    """Of 13 answers each, in batches of 8: as many prompts in all batches together as there must be, and some more."""
    rows = [Row([n // 13], [9]) for n in range(13 * 200)]
    order = order_of(rows, 8)
    batches = [{n // 13 for n in order[start : start + 8]} for start in range(0, len(order), 8)]
    assert sum(map(len, batches)) <= 1.35 * 400


def test_long_groups_are_shuffled_among_the_rest() -> None:
    rows = [Row([1], [9])] * 40 + [Row([n], [9]) for n in range(2, 42)]
    for epoch in range(5):
        order = order_of(rows, 4, epoch=epoch)
        whole = [start for start in range(0, 80, 4) if all(n < 40 for n in order[start : start + 4])]
        assert len(whole) == 10, "nothing is cut that fits"
        assert whole != list(range(whole[0], whole[0] + 40, 4)), "one after another"


@pytest.mark.parametrize(("batch_size", "blank"), [(1, 1), (2, 1), (3, 5), (10, 13)])
def test_no_row_comes_twice_with_several_processes(batch_size: int, blank: int) -> None:
    """As Accelerate deals batches out."""
    rows = [Row([n], [n]) for n in range(7)]
    sampler = BatchSampler(Order(shared_groups(rows), batch_size, seed=0, num_processes=2), batch_size, drop_last=False)
    shards = [list(BatchSamplerShard(sampler, num_processes=2, process_index=index)) for index in range(2)]
    assert len(shards[0]) == len(shards[1])
    dealt = [WithBlank(rows)[n] for shard in shards for batch in shard for n in batch]
    assert sorted(row.prompt_ids[0] for row in dealt if row) == list(range(7))
    assert dealt.count(None) == blank
    assert len(Order(shared_groups(rows), batch_size, seed=0)) == 7, "one process has no need of it"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_blank_batch_teaches_nothing(side: Any) -> None:
    collate = Collator(side=side, share_prompts=True)
    row = Row([1, 2], [3])
    assert {name: tensor.tolist() for name, tensor in collate([None, row, None]).items()} == {
        name: tensor.tolist() for name, tensor in collate([row]).items()
    }
    blank = collate([None, None])
    assert set(blank) == set(collate([row]))
    assert (blank["labels"] == IGNORE).all()
    assert int(blank["row_tokens"].sum()) == 0


def test_order_splits_few_groups() -> None:
    rows = rows_of(1)
    order = order_of(rows, 8)
    batches = [set(order[start : start + 8]) for start in range(0, len(order), 8)]
    split = sum(not any(set(group) <= batch for batch in batches) for group in groups_of(rows))
    assert split <= len(batches) // 4


def test_arranging_weighs_sharing_against_attention() -> None:
    prompt = list(range(100))
    rows = [Row(prompt, [n] * 20) for n in range(4)]
    assert [len(sequence) for sequence in arrange(rows, 1e-3)] == [4]
    lone = [Row([n] * 100, [n] * 20) for n in range(4)]
    assert [len(sequence) for sequence in arrange(lone, 1e-3)] == [1] * 4
    mixed = [Row([1] * 200, [2]), *(Row([n], [n] * 30) for n in range(3, 9))]
    assert [len(sequence) for sequence in arrange(mixed, 1e-3)] == [1, 6], "short rows are not padded to the long one"


def test_a_wide_model_shares_more() -> None:
    narrow, wide = (pair_cost(LlamaConfig(hidden_size=size)) for size in (576, 4096))
    assert 0 < wide < narrow < 1e-2


REFUSED: dict[str, tuple[Any, str]] = {
    "architecture": (Qwen3NextConfig(num_hidden_layers=2), "it is a qwen3_next, and they are known .* on .*llama"),
    "window": (
        MistralConfig(sliding_window=32),
        "sliding window of 32 tokens, and rows may have 64. Set it to false, or train.max_length to 32 or less",
    ),
    "some windows": (
        Qwen2Config(use_sliding_window=True, sliding_window=32, max_window_layers=1, num_hidden_layers=2),
        "sliding window",
    ),
    "rope": (
        LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "rope_type dynamic",
    ),
    "other layers": (
        LlamaConfig(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2),
        "layers of linear_attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_keep_rows_apart(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, reason = REFUSED[case]
    for key in ("packing", "share_prompts"):
        with pytest.raises(UserError, match=rf"train\.{key}: on base rows .* could see.*{reason}") as caught:
            keep_apart(TrainConfig(**{key: True}), config, "base", 64)
        assert caught.value.exit_code == 2
    assert keep_apart(TrainConfig(), config, "base", 64) == (False, False)
    assert "train.share_prompts is off: on base" in capsys.readouterr().err
    assert keep_apart(TrainConfig(share_prompts=False), config, "base", 64) == (False, False)
    assert not capsys.readouterr().err


def test_models_that_can() -> None:
    full = MistralConfig(sliding_window=None), MistralConfig(sliding_window=64), LlamaConfig(), Qwen2Config()
    for config in full:
        assert keep_apart(TrainConfig(packing=True), config, "base", 64) == (True, True)
