"""Settings of an RL run that no run can do as they say, known without data, weights or a GPU. No torch here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.serving.options import check_options

PACKAGES = {"trl": "trl", "math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}


def grpo_problems(config: PreftConfig) -> list[str]:
    """What is wrong, each with its key and what to do."""
    return [*_groups(config), *_not_for_rl(config), *_rollouts(config), *_packages(config)]


def _groups(config: PreftConfig) -> list[str]:
    train, grpo = config.train, config.train.grpo
    answers = train.batch_size * train.gradient_accumulation_steps
    found = []
    if grpo.num_generations < 2:
        found.append(
            "train.grpo.num_generations: 1: an answer is only judged beside other answers to the same prompt; set it to 2 or more"
        )
    elif answers % grpo.num_generations:
        found.append(
            f"train.batch_size: a step has {answers} answers (batch_size x gradient_accumulation_steps), which are no whole "
            f"groups of train.grpo.num_generations = {grpo.num_generations}; make it a multiple"
        )
    if train.save_every and train.save_every % grpo.num_iterations:
        found.append(
            f"train.save_every: {train.save_every} is in the middle of train.grpo.num_iterations = {grpo.num_iterations} steps "
            "on the same answers, which checkpoints do not hold; make it a multiple"
        )
    if grpo.max_completion_length >= train.max_length:
        found.append(
            f"train.grpo.max_completion_length: {grpo.max_completion_length} leaves no room for a prompt in train.max_length = "
            f"{train.max_length}; raise the latter"
        )
    return found


def _not_for_rl(config: PreftConfig) -> list[str]:
    """Settings that only supervised finetuning knows, and those under which probabilities could not be compared."""
    train = config.train
    reasons = {
        "train.validation_file": (train.validation_file, "accuracy is measured on held-out problems alone"),
        "train.early_stopping": (train.early_stopping, "the adapter of the last step is kept"),
        "train.keep: best": (train.keep == "best", "the adapter of the last step is kept"),
        "train.packing": (train.packing, "answers to one prompt share its computation anyway"),
        "train.num_processes": (
            train.num_processes > 1,
            "one process trains; put the engine on other GPUs by rollout_url",
        ),
        "train.quantize_base": (train.quantize_base, "the engine samples from the unquantised base"),
        "adapter.dropout": (config.adapter.dropout, "probabilities of one answer would differ from pass to pass"),
    }
    return [f"{key}: not with train.task: grpo, {why}; leave it out" for key, (value, why) in reasons.items() if value]


def _rollouts(config: PreftConfig) -> list[str]:
    grpo = config.train.grpo
    if grpo.rollout_url and not grpo.rollout_store:
        return ["train.grpo.rollout_url: set train.grpo.rollout_store too, the adapters folder of that server"]
    if grpo.rollout_store and not grpo.rollout_url:
        return ["train.grpo.rollout_store: set train.grpo.rollout_url too, or leave it out"]
    return [] if grpo.rollout_url else _engine_here(config)


def _engine_here(config: PreftConfig) -> list[str]:
    """Settings that an engine in this process cannot start with, or would cut answers under."""
    serve, longest = config.serve, config.train.max_length
    found = []
    try:
        check_options(serve.vllm_args)
    except UserError as error:
        found.append(str(error))
    if serve.max_model_len and serve.max_model_len < longest:
        found.append(
            f"serve.max_model_len: {serve.max_model_len} is less than train.max_length = {longest}, so that the engine would cut "
            "answers; raise it or leave it out, or lower train.max_length"
        )
    if serve.tensor_parallel_size > 1 or serve.data_parallel_size > 1:
        found.append(
            "serve.tensor_parallel_size: the engine in this process has one GPU; use preft serve and train.grpo.rollout_url"
        )
    if find_spec("vllm") is None:
        found.append(
            "train.task: grpo: vllm is not installed: pip install 'preft[gpu]' (or 'preft[cpu]'), or set train.grpo.rollout_url"
        )
    return found


def _packages(config: PreftConfig) -> list[str]:
    grpo = config.train.grpo
    needed = {"trl"} | ({"reasoning_gym"} if grpo.environment else set())
    missing = sorted(name for name in needed if find_spec(name) is None)
    return [f"train.task: grpo: {PACKAGES[name]} is not installed: pip install 'preft[rl]'" for name in missing]


def count_problems(config: PreftConfig, root: Path) -> tuple[dict[str, int], list[str]]:
    """How many problems there are, by the key of the file that would hold them, and what is wrong with them."""
    from preft_cli.rl.load import load_problems
    from preft_cli.rl.rewards.load import load_rewards

    try:
        load_rewards(config, root)
        found = load_problems(config, root)
    except UserError as error:
        return {}, [str(error)]
    return {"train.file": len(found.train), "eval.file": len(found.held_out)}, []
