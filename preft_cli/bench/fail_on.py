"""`--fail-on "lorap/base<0.9"`: conditions on a result that end `preft bench` with exit code 3.

They are checked before the benchmark starts, as far as they can be: a misspelt arm must not cost an hour. What the result
turns out to lack counts as met, for a check that cannot be made has not passed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from preft_cli.bench.numbers import ratio
from preft_cli.bench.results import ArmResult, BenchResult, Spread
from preft_cli.config.near import near_words
from preft_cli.errors import UserError

Measured = Spread | float | None
"""None: the result has no such number."""

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
PARTS = ("low", "median", "high")
_FORM = re.compile(rf"([^<>=!]+)({'|'.join(SIGNS)})([^<>=!]+)")


@dataclass(frozen=True)
class Condition:
    """One `--fail-on`."""

    text: str
    """As the person wrote it."""
    quantity: str
    read: Callable[[BenchResult], Measured]
    sign: str
    limit: float

    def met(self, result: BenchResult) -> str | None:
        """Why the benchmark fails, as a sentence; None if the condition is not met."""
        found = self.read(result)
        if found is None:
            return f"the result has no {self.quantity}, so --fail-on {self.text} counts as met"
        value = found.median if isinstance(found, Spread) else found
        if not SIGNS[self.sign](value, self.limit):
            return None
        around = f" ({_digits(found.low)} to {_digits(found.high)})" if isinstance(found, Spread) else ""
        return f"{self.quantity} is {_digits(value)}{around}, which meets --fail-on {self.text}"


def parse(texts: Sequence[str], arms: list[str]) -> list[Condition]:
    """The conditions behind `--fail-on`, for a benchmark with these arms.

    Raises:
        UserError: one that is nonsense, or names an arm that the benchmark will not have. Exit code 2.
    """
    return [_condition(text.strip(), arms) for text in texts]


def _condition(text: str, arms: list[str]) -> Condition:
    form = _FORM.fullmatch("".join(text.split()))
    limit = _number(form[3]) if form else None
    if form is None or limit is None:
        raise UserError(f"--fail-on {text}: expected a quantity, a sign and a number, such as lorap/base<0.9", 2)
    quantity, sign = form[1], form[2]
    try:
        return Condition(text, quantity, _reader(quantity, arms), sign, limit)
    except _Unknown as unknown:
        raise UserError(f"--fail-on {text}: {unknown}", 2) from None


class _Unknown(Exception):
    """A quantity that no result of this benchmark will have."""


def _reader(quantity: str, arms: list[str]) -> Callable[[BenchResult], Measured]:
    """What gets the quantity out of a result."""
    whole, _, last = quantity.rpartition(".")
    if last in PARTS and ("/" in whole or whole.endswith(("_per_second", "_ms", "goodput"))):
        return partial(_part_of, _reader(whole, arms), last)
    if quantity == "failures":
        return lambda result: float(result.failures)
    if "/" in quantity:
        over, _, under = quantity.partition("/")
        _check_arms([over, under], arms)
        return lambda result: ratio(result.ratios, over, under)
    arm, _, name = quantity.partition(".")
    if name not in OF_AN_ARM:
        near = near_words(name, list(OF_AN_ARM)) if name else near_words(quantity, ["failures"])
        meant = f" (did you mean {f'{arm}.{near}' if name else near}?)" if near else ""
        known = "A/B, A/B.low, A/B.high, failures, ARM.requests_per_second, ARM.output_tokens_per_second, ARM.goodput"
        raise _Unknown(f"there is no quantity {quantity}{meant}; known: {known}, ARM.preemptions, ARM.ttft_p99_ms")
    _check_arms([arm], arms)
    return lambda result: OF_AN_ARM[name](result.arms[arm]) if arm in result.arms else None


def _part_of(read: Callable[[BenchResult], Measured], part: str, result: BenchResult) -> Measured:
    found = read(result)
    return {"low": found.low, "median": found.median, "high": found.high}[part] if isinstance(found, Spread) else found


def _check_arms(named: list[str], arms: list[str]) -> None:
    for arm in named:
        if arm not in arms:
            near = near_words(arm, arms)
            meant = f" (did you mean {near}?)" if near else ""
            raise _Unknown(f"the benchmark has no arm {arm}{meant}; its arms: {', '.join(arms)} (bench.arms)")
    if len(set(named)) < len(named):
        raise _Unknown("a ratio needs two arms")


OF_AN_ARM: dict[str, Callable[[ArmResult], Measured]] = {
    "requests_per_second": lambda arm: arm.requests_per_second,
    "output_tokens_per_second": lambda arm: arm.output_tokens_per_second,
    "preemptions": lambda arm: float(arm.preemptions),
    "failures": lambda arm: float(arm.failures),
    "goodput": lambda arm: arm.goodput,
} | {
    f"{name}_{statistic}_ms": partial(ArmResult.latency, metric=name, statistic=statistic)
    for name in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "p50", "p90", "p99")
}


def _number(text: str) -> float | None:
    """A finite number; `nan` would never be met, and quietly so."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _digits(value: float) -> str:
    """Four digits: enough to see on which side of the limit a value lies."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
