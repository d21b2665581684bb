"""Counts, lengths, duplicates and leakage of tokenised rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from preft_cli.data.check.result import Bin, Dropped, FileCheck, Leak, Lengths, Same
from preft_cli.data.tokenise import TokenisedRows
from preft_cli.data.turn import Row, Turn

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and completion: with the same ids at another boundary, another thing is learnt."""


def count_file(setting: str, file: str, turns: Sequence[Turn], data: TokenisedRows, limit: int) -> FileCheck:
    """Everything about one file; `limit` is the longest row that is kept."""
    prompts = Counter(tuple(row.prompt_ids) for row in data.rows)
    return FileCheck(
        setting=setting,
        file=file,
        conversations=len({turn.where for turn in turns}),
        rows=len(data.rows),
        dropped=[
            Dropped(where=row.where, reason=f"{row.tokens} tokens, longer than train.max_length or the model's {limit}")
            for row in data.long
        ],
        prompt=_lengths(len(row.prompt_ids) for row in data.rows),
        completion=_lengths(len(row.completion_ids) for row in data.rows),
        histogram=_histogram([len(row) for row in data.rows]),
        duplicates=_duplicates(data.rows),
        prompts=len(prompts),
        sharing_prompt=sum(count for count in prompts.values() if count > 1) / len(data.rows),
        remarks=data.remarks(setting, limit),
    )


def find_leaks(files: dict[str, TokenisedRows]) -> list[Leak]:
    """What each file has in common with each that comes before it: none of them may be trained or chosen on."""
    names = list(files)
    pairs = [(held_out, seen) for index, held_out in enumerate(names) for seen in names[:index]]
    found = [_leak(held_out, seen, files[held_out].rows, files[seen].rows) for held_out, seen in pairs]
    return [leak for leak in found if leak.rows or leak.prompts]


def _leak(held_out: str, seen_in: str, rows: Sequence[Row], seen: Sequence[Row]) -> Leak:
    first = _first_places(seen)
    prompts = {prompt for prompt, _ in first}
    same = [Same(where=row.where, of=first[_key(row)]) for row in rows if _key(row) in first]
    return Leak(
        held_out=held_out, seen_in=seen_in, rows=same, prompts=sum(tuple(row.prompt_ids) in prompts for row in rows)
    )


def _duplicates(rows: Sequence[Row]) -> list[Same]:
    seen: dict[Key, str] = {}
    found = []
    for row in rows:
        if (key := _key(row)) in seen:
            found.append(Same(where=row.where, of=seen[key]))
        else:
            seen[key] = row.where
    return found


def _first_places(rows: Sequence[Row]) -> dict[Key, str]:
    return {_key(row): row.where for row in reversed(rows)}


def _key(row: Row) -> Key:
    return tuple(row.prompt_ids), tuple(row.completion_ids)


def _lengths(found: Iterable[int]) -> Lengths:
    """The p-th percentile is the smallest length that at least p percent of the rows do not exceed."""
    ordered = sorted(found)

    def percentile(p: int) -> int:
        return ordered[-(-len(ordered) * p // 100) - 1]

    return Lengths(median=percentile(50), p95=percentile(95), max=ordered[-1])


def _histogram(lengths: list[int]) -> list[Bin]:
    """Bars whose upper ends double, from the first to the last that is not empty."""
    bars = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return [Bin(up_to=2**power, rows=bars[power]) for power in range(min(bars), max(bars) + 1)]
