"""From `train.grpo.rewards` to what judges answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from preft_cli.config.grpo_section import GrpoConfig, RewardConfig
from preft_cli.config.messages import explain
from preft_cli.config.near import near_words
from preft_cli.config.schema import PreftConfig
from preft_cli.config.section import Section
from preft_cli.errors import UserError
from preft_cli.rl.problem import Reward
from preft_cli.rl.rewards.code import CodeArgs, CodeReward
from preft_cli.rl.rewards.environment import EnvironmentArgs, EnvironmentReward
from preft_cli.rl.rewards.format import FormatArgs, FormatReward
from preft_cli.rl.rewards.function import FunctionReward
from preft_cli.rl.rewards.math import MathArgs, MathReward
from preft_cli.rl.rewards.needs import reward_configs
from preft_cli.rl.tasks.gym import has_package

KNOWN = ["math", "code", "format", "environment"]
PACKAGES = {"math": ("math_verify", "math-verify"), "environment": ("reasoning_gym", "reasoning-gym")}

Args = TypeVar("Args", bound=Section)


def load_rewards(config: PreftConfig, root: Path) -> list[tuple[Reward, float]]:
    """The parts of the reward with their weights, in the config's order.

    Args:
        root: the folder of the config, from which functions can be imported too.

    Raises:
        UserError: unknown names, wrong settings, missing packages or functions: all of them.
    """
    rewards, problems = _load(config, root)
    if problems:
        raise UserError("\n".join(problems), 2)
    return rewards


def reward_problems(config: PreftConfig, root: Path) -> list[str]:
    """What `load_rewards` would raise, a line each."""
    return _load(config, root)[1]


def _load(config: PreftConfig, root: Path) -> tuple[list[tuple[Reward, float]], list[str]]:
    configs = reward_configs(config)
    rewards: list[tuple[Reward, float]] = []
    problems = [] if configs else ["train.grpo.rewards: the list is empty; name one reward, such as math"]
    for index, one in enumerate(configs):
        try:
            rewards.append((_reward(one, config.train.grpo, root), one.weight))
        except UserError as error:
            problems.append(f"train.grpo.rewards[{index}] ({one.reward}): {error}")
    names = [one.reward for one in configs if one.reward in KNOWN and one.reward != "format"]
    problems += [
        f"train.grpo.rewards: {name} stands there twice" for name in sorted(set(names)) if names.count(name) > 1
    ]
    if configs and not any(one.weight for one in configs):
        problems.append("train.grpo.rewards: every weight is 0, so that no answer is better than another")
    return rewards, problems


def _reward(config: RewardConfig, grpo: GrpoConfig, root: Path) -> Reward:
    name = config.reward
    if ":" in name:
        return FunctionReward(name, config.args, root)
    if name not in KNOWN:
        near = near_words(name, KNOWN)
        hint = f"did you mean {near}?" if near else f"expected one of {', '.join(KNOWN)}, or package.module:function"
        raise UserError(f"no reward of that name; {hint}", 2)
    module, package = PACKAGES.get(name, ("", ""))
    if module and not has_package(module):
        raise UserError(f"{package} is not installed: pip install 'preft[rl]'", 2)
    if name == "math":
        return MathReward(_args(MathArgs, config))
    if name == "code":
        return CodeReward(_args(CodeArgs, config))
    if name == "format":
        return FormatReward(_args(FormatArgs, config))
    if not grpo.environment:
        raise UserError("train.grpo.environment is not set; it names what scores the answers", 2)
    return EnvironmentReward(_args(EnvironmentArgs, config), grpo)


def _args(model: type[Args], config: RewardConfig) -> Args:
    """
    Raises:
        UserError: settings that the reward does not have, or wrong values.
    """
    try:
        return model.model_validate(config.args)
    except ValidationError as error:
        texts: list[str] = []
        for found in error.errors():
            path: tuple[Any, ...] = found["loc"]
            texts.append(f"args.{'.'.join(map(str, path))}: {explain(model, path, found)}")
        raise UserError("; ".join(texts), 2) from error
