"""Environments of reasoning-gym as tasks: problems that never leak, settings by their own names, their own scores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.load import load_problems
from preft_cli.rl.problem import Problem, Problems, Reward
from preft_cli.rl.rewards.load import load_rewards, reward_problems
from preft_cli.rl.rewards.verifiers import best_constant, check_verifiers
from preft_cli.rl.tasks import gym
from preft_cli.rl.tasks.environment import BARE

HERE = Path()


def config(environment: str | None = "gcd", seed: int = 0, **grpo: Any) -> PreftConfig:
    grpo = {"environment": environment, "train_problems": 40, "eval_problems": 20, **grpo}
    return PreftConfig.model_validate({"project": {"seed": seed}, "train": {"task": "grpo", "grpo": grpo}})


def questions(problems: list[Problem]) -> set[str]:
    return {str(problem.record["question"]) for problem in problems}


def refusal(**grpo: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_problems(config(**grpo), HERE)
    return str(caught.value)


def test_the_prompt_is_solved_problems_and_then_the_question() -> None:
    problems = load_problems(config(), HERE)
    assert (len(problems.train), len(problems.held_out), problems.name) == (40, 20, "gcd")
    prompts = [problem.prompt for problem in (*problems.train, *problems.held_out)]
    assert len({prompt[:4] for prompt in prompts}) == 1, "the worked examples are the same for all"
    assert not isinstance(prompts[0], str)
    messages = [message for message in prompts[0] if not isinstance(message, str)]
    assert [message.role for message in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[-1].text == f"{problems.train[0].record['question']}\n\n{BARE}"
    assert messages[1].text.isdigit()
    (alone,) = load_problems(config(worked_examples=0, train_problems=1), HERE).train[0].prompt
    assert BARE in str(alone)


def test_no_problem_comes_twice_is_held_out_and_trained_on_or_shown() -> None:
    """Of 81 different problems 70 are asked for: drawn at will, most would come twice."""
    problems = load_problems(config(environment_args={"min_value": 1, "max_value": 9}, train_problems=50), HERE)
    train, held_out = questions(problems.train), questions(problems.held_out)
    shown = {str(message).replace(f"\n\n{BARE}", "") for message in problems.train[0].prompt[:-1:2]}
    assert (len(train), len(held_out)) == (50, 20)
    assert not train & held_out
    assert not [question for question in train | held_out if any(question in text for text in shown)]


def test_seeds_repeat_and_differ() -> None:
    once, again, other = (load_problems(config(seed=seed), HERE) for seed in (0, 0, 1))
    assert once == again
    assert not questions(once.train) & questions(other.train)
    assert once.held_out == other.held_out, "accuracies of several seeds compare"
    assert once.train[0].prompt[:4] == other.train[0].prompt[:4]


def test_too_few_problems() -> None:
    few = {"min_value": 1, "max_value": 3}
    assert "has only 9 different problems with these environment_args" in refusal(environment_args=few)
    problems = load_problems(config(environment_args=few, eval_problems=2, worked_examples=1), HERE)
    assert len(problems.train) == 6
    assert problems.remarks == [
        "train.grpo.train_problems: gcd has only 6 different problems left, not 40; those are used"
    ]


def test_names_and_settings_that_are_wrong() -> None:
    assert refusal(environment="gdc") == "train.grpo.environment: reasoning-gym has no 'gdc'; did you mean gcd?"
    assert "expected one of ab, acre, " in refusal(environment="zzzzzz")
    assert "it mixes other environments" in refusal(environment="composite")
    args = "train.grpo.environment_args"
    for given, found in (
        ({"max_numbrs": 3}, f"{args}.max_numbrs: gcd has no such setting; did you mean max_numbers?"),
        (
            {"q": 3},
            f"{args}.q: gcd has no such setting; expected one of min_numbers, max_numbers, min_value, max_value",
        ),
        ({"seed": 3}, f"{args}.seed: set project.seed instead"),
        ({"max_numbers": 1}, f"{args}: gcd refuses them: max_numbers must be >= min_numbers"),
        ({"max_numbers": "x"}, f"{args}.max_numbers: expected a whole number (default: 2), found 'x'"),
        ({"max_numbers": 2.5}, f"{args}.max_numbers: expected a whole number (default: 2), found 2.5"),
        ({"min_numbers": None}, f"{args}.min_numbers: expected a whole number (default: 2), found nothing"),
        ({"min_numbers": True}, f"{args}.min_numbers: expected a whole number (default: 2), found true"),
    ):
        assert refusal(environment_args=given).startswith(found)
    assert "rush_hour judges answers but has none of its own to show" in refusal(
        environment="rush_hour", train_problems=1
    )


def test_the_environment_that_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A placeholder stands in for pycosat while the others are imported, and for no longer."""
    monkeypatch.setattr(gym, "has_package", lambda name: name != "pycosat")
    assert "zebra_puzzles needs the package pycosat" in refusal(environment="zebra_puzzles")
    assert "pycosat" not in sys.modules


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "has_package", lambda name: name != "reasoning_gym")
    assert refusal() == "train.grpo.environment: reasoning-gym is not installed: pip install 'preft[rl]'"


def test_nothing_is_printed_and_no_torch_is_imported() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from pathlib import Path\n"
        "from preft_cli.config.schema import PreftConfig\n"
        "from preft_cli.rl.load import load_problems\n"
        "from preft_cli.rl.rewards.load import load_rewards\n"
        "grpo = {'environment': 'letter_counting', 'train_problems': 2, 'eval_problems': 1}\n"
        "config = PreftConfig.model_validate({'train': {'task': 'grpo', 'grpo': grpo}})\n"
        "load_problems(config, Path()), load_rewards(config, Path())\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules, 'torch'\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


Judged = tuple[Problems, Reward]


@pytest.fixture(scope="module")
def syllogism() -> Judged:
    """Questions whose answer is Yes or No, and what judges answers to them."""
    given = config("syllogism", train_problems=60)
    [(reward, weight)] = load_rewards(given, HERE)
    assert (reward.name, weight) == ("environment", 1.0)
    return load_problems(given, HERE), reward


def test_its_own_score_of_the_answer_alone(syllogism: Judged) -> None:
    problems, reward = syllogism
    problem = problems.train[0]
    right, wrong = sorted(("Yes", "No"), key=lambda word: word != problem.answer)
    completions = [
        right,
        f" {right}\n",
        f"It is\n<answer>{right}</answer>.",
        wrong,
        f"<answer>{wrong}</answer> {right}",
        "",
    ]
    scores = reward([problem] * len(completions), completions)
    assert scores[:3] == [1.0] * 3
    assert all(score is not None and score < 1 for score in scores[3:])
    assert check_verifiers(problems.train, [(reward, 1.0)]) == []


def test_the_best_constant_answer(syllogism: Judged) -> None:
    problems, reward = syllogism
    found = best_constant(problems, reward)
    assert found is not None
    answer, accuracy = found
    right = [problem.answer for problem in problems.held_out]
    assert answer in ("Yes", "No")
    assert accuracy == max(right.count("Yes"), right.count("No")) / 20
    assert best_constant(Problems(problems.train, []), reward) is None


def test_a_reward_without_its_environment() -> None:
    given = config(None, rewards=["environment"])
    assert reward_problems(given, HERE) == [
        "train.grpo.rewards[0] (environment): train.grpo.environment is not set; it names what scores the answers"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="needs seccomp and Landlock")
def test_an_answer_that_is_evaluated_writes_nothing_and_knows_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment countdown hands answers to sympy, which evaluates them as Python."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    target = tmp_path / "canary"
    [(reward, _)] = load_rewards(config("countdown"), HERE)
    problem = load_problems(config("countdown", train_problems=1, eval_problems=1, worked_examples=0), HERE).train[0]
    answers = [
        str(problem.answer),
        f"__import__('os').system('echo $HF_TOKEN > {target}')",
        f"open({str(target)!r}, 'w').write('x')",
        f"__import__('pathlib').Path({str(target)!r}).write_text(__import__('os').environ.get('HF_TOKEN', ''))",
        str(problem.answer),
    ]
    scores = reward([problem] * len(answers), answers)
    assert (scores[0], scores[-1]) == (1.0, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_answers_that_hold_the_right_one_are_paid_in_part_or_not_at_all() -> None:
    [found] = load_problems(config(train_problems=1), HERE).train
    answers = [found.answer or "", f"{found.answer} or so, I think", "none"]
    own = [{"reward": "environment", "args": {"partial": False}}]
    [(partly, _)], [(wholly, _)] = (load_rewards(one, HERE) for one in (config(), config(rewards=own)))
    right, near, wrong = partly([found] * 3, answers)
    assert (right, wrong) == (1, 0)
    assert near is not None
    assert 0 < near < 1
    assert wholly([found] * 3, answers) == [1, 0, 0]
