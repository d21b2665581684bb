"""What rewards need of a problem, known from names alone."""

from __future__ import annotations

from typing import Any

from preft_cli.config.grpo_section import RewardConfig
from preft_cli.config.schema import PreftConfig
from preft_cli.data.found import kind
from preft_cli.rl.rewards.programs import has_tests


def reward_configs(config: PreftConfig) -> list[RewardConfig]:
    """`train.grpo.rewards`, or its default: what the environment scores, or math."""
    grpo = config.train.grpo
    if grpo.rewards is not None:
        return grpo.rewards
    return [RewardConfig(reward="environment" if grpo.environment else "math")]


def reward_names(config: PreftConfig) -> list[str]:
    """As they stand in the config."""
    return [reward.reward for reward in reward_configs(config)]


def has_answer(record: dict[str, Any]) -> bool:
    """A text or a number that an answer can be compared with."""
    answer = record.get("answer")
    if isinstance(answer, str):
        return bool(answer.strip())
    return isinstance(answer, int | float) and not isinstance(answer, bool)


NEEDS = {
    "math": (has_answer, 'an "answer" (text or a number), or a "solution" with \\boxed{…}'),
    "code": (has_tests, '"tests", "test_list" or "test" (assert statements)'),
}


def lacks(record: dict[str, Any], names: list[str]) -> str | None:
    """What is missing for those rewards of `names` that compare with the record; one of them is enough."""
    needs = {name: NEEDS[name] for name in names if name in NEEDS}
    if not needs or any(has(record) for has, _ in needs.values()):
        return None
    wanted = "; ".join(f"the reward {name} needs {text}" for name, (_, text) in needs.items())
    found = "; ".join(
        f'"{key}" is {_empty(record[key])}' for key in ("answer", "tests", "test_list", "test") if key in record
    )
    return f"{wanted}; {found or 'the row has none'}"


def _empty(value: Any) -> str:
    return "empty" if isinstance(value, str) and not value.strip() else kind(value)
