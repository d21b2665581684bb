"""`preft bench compare`: what changed between two results beyond the noise of their repetitions."""

from __future__ import annotations

from typing import Any, Literal

from preft_cli.bench.results import BenchResult, Record, Spread

SECTIONS = ("project", "model", "serve", "bench")
"""Of the config; the others have no part in a benchmark."""

_TOLD_ELSEWHERE = {"project.name", "model.base", "bench.enable_prefix_caching"}
"""Config keys that say nothing of the measurement, or that a field of the result says."""

FEW = 3
"""With fewer repetitions, ranges are too narrow to hold the noise."""


class Setting(Record):
    """Something in which the two measurements differ."""

    name: str
    a: Any
    b: Any


class Change(Record):
    """One quantity in both results."""

    name: str
    """`lorap.requests_per_second`, `lorap.output_tokens_per_second`, `lorap.ttft_p99_ms` and the like, or `lorap/base`."""
    a: Spread
    b: Spread
    percent: float | None
    """Change of the median; None where the first is zero."""
    changed: bool
    """Whether the ranges lie apart; else the difference is within the noise."""


class Difference(Record):
    """From result A to result B."""

    schema_version: Literal[1] = 1
    a: str
    b: str
    settings: list[Setting]
    """If not empty, the numbers may not compare."""
    cautions: list[str]
    """Other reasons to doubt them."""
    only_a: list[str]
    """Arms that B lacks, and ratios that B lacks though it has their arms."""
    only_b: list[str]
    changes: list[Change]


def compare(a: BenchResult, b: BenchResult) -> Difference:
    """What changed from `a` to `b`, both from `load_result`."""
    before, after = measured(a), measured(b)
    return Difference(
        a=str(a.path or "A"),
        b=str(b.path or "B"),
        settings=settings(a, b),
        cautions=[text for name, result in (("A", a), ("B", b)) for text in cautions(name, result)],
        only_a=only(a, b),
        only_b=only(b, a),
        changes=[change(name, before[name], after[name]) for name in before if name in after],
    )


def change(name: str, a: Spread, b: Spread) -> Change:
    """Changed only if the ranges do not overlap."""
    percent = (b.median / a.median - 1) * 100 if a.median else None
    return Change(name=name, a=a, b=b, percent=percent, changed=a.high < b.low or b.high < a.low)


def measured(result: BenchResult) -> dict[str, Spread]:
    """All quantities that are compared: first the arms', then the ratios."""
    found: dict[str, Spread | None] = {}
    for name, arm in result.arms.items():
        found |= {
            f"{name}.{of}": getattr(arm, of) for of in ("requests_per_second", "output_tokens_per_second", "goodput")
        }
        found |= {
            f"{name}.{of}_{at}_ms": arm.latency(of, at) for of in ("ttft", "tpot", "e2el") for at in ("p50", "p99")
        }
    return {name: spread for name, spread in found.items() if spread is not None} | result.ratios


def only(one: BenchResult, other: BenchResult) -> list[str]:
    """Arms and ratios of `one` that `other` lacks; a ratio goes without saying where one of its arms is missing."""
    arms = [arm for arm in one.arms if arm not in other.arms]
    both = [ratio for ratio in one.ratios if all(arm in other.arms for arm in ratio.split("/"))]
    return arms + [ratio for ratio in both if ratio not in other.ratios]


def settings(a: BenchResult, b: BenchResult) -> list[Setting]:
    """How the two were measured, where that differs."""
    both = [name for name in a.arms if name in b.arms]
    first, second = described(a, both), described(b, both)
    return [
        Setting(name=name, a=first.get(name), b=second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def described(result: BenchResult, arms: list[str]) -> dict[str, Any]:
    """Everything that the numbers of these arms depend on, flat: `hardware.gpus`, `bench.rank`, `lora.max_loras`."""
    fields = {"model", "device", "prefix_caching", "hardware", "versions", "commit"}
    config = result.config.model_dump(mode="json", include=set(SECTIONS))
    keys = {key: value for key, value in flat(config).items() if key not in _TOLD_ELSEWHERE}
    chosen = {name: {**result.arms[name].engine_args, "variant": result.arms[name].variant} for name in arms}
    sized = {key: value for key, value in flat(chosen).items() if not key.endswith(".model")}
    return flat(result.model_dump(mode="json", include=fields)) | keys | sized


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def cautions(name: str, result: BenchResult) -> list[str]:
    """What makes one result doubtful by itself."""
    found = []
    if result.failures:
        found.append(f"{name}: {result.failures} requests failed")
    fewest = min((len(arm.repetitions) for arm in result.arms.values()), default=0)
    if fewest < FEW:
        found.append(f"{name}: {fewest} repetitions of an arm give no fair range; `changed` may be noise")
    return found
