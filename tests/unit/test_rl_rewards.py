"""Rewards, what they add up to, and a verifier that never fires."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.problem import Problem, Problems
from preft_cli.rl.rewards import load
from preft_cli.rl.rewards.judge import Judge
from preft_cli.rl.rewards.load import load_rewards, reward_problems
from preft_cli.rl.rewards.math import MathArgs, MathReward
from preft_cli.rl.rewards.score import score
from preft_cli.rl.rewards.verifiers import best_constant, check_verifiers, right_answers
from tests.unit import mischief


def config(*rewards: Any) -> PreftConfig:
    return PreftConfig.model_validate({"train": {"task": "grpo", "grpo": {"rewards": list(rewards)}}})


def problem(answer: Any = "18", line: int = 1, **record: Any) -> Problem:
    return Problem("what is 9 + 9?", {"answer": answer, **record}, f"train.jsonl:{line}")


class Given:
    """A reward that gives what it is told."""

    def __init__(self, *values: float | None, name: str = "given") -> None:
        self.name, self.values = name, values

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        return list(self.values)


@pytest.fixture(scope="module")
def math_reward() -> MathReward:
    return MathReward(MathArgs())


def test_mathematics_that_is_equal_and_that_is_not(math_reward: MathReward) -> None:
    cases = {
        ("18", "\\boxed{18}"): 1.0,
        ("18", "9 + 9 = 18\n#### 18"): 1.0,
        ("18", "The answer is 18."): 1.0,
        ("18", "18"): 1.0,
        ("18", "#### $18"): 1.0,
        ("18", "<answer>18</answer> not 19"): 1.0,
        ("18", "\\boxed{1} no, \\boxed{18}"): 1.0,
        ("$18$", "\\boxed{18 \\text{ apples}}"): 1.0,
        ("1,234", "1234"): 1.0,
        ("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}"): 1.0,
        ("1/2", "$\\frac12$"): 1.0,
        ("x^2+1", "\\boxed{1 + x^2}"): 1.0,
        ("\\text{yes}", "\\boxed{yes}"): 1.0,
        ("18", "\\boxed{18} no, \\boxed{19}"): 0.0,
        ("18", "18, or rather 19"): 0.0,
        ("18", "\\boxed{}"): 0.0,
        ("18", "\\boxed{18"): 0.0,
        ("18", ""): 0.0,
        ("18", "\x00 \ud83d"): 0.0,
        ("yes", "\\boxed{no}"): 0.0,
    }
    given = math_reward([problem(right) for right, _ in cases], [completion for _, completion in cases])
    assert dict(zip(cases, given, strict=True)) == cases
    assert math_reward([problem(None), problem(18), problem("")], ["18"] * 3) == [None, 1.0, None]


def test_an_answer_that_computes_for_ever_is_wrong_and_the_next_is_judged(math_reward: MathReward) -> None:
    """In a thread too, where math-verify's own alarm cannot work."""
    begin, found = time.monotonic(), list[Any]()
    answers = ["18", "\\boxed{9^{9^{9^{9}}}}", "18"]
    thread = threading.Thread(target=lambda: found.extend(math_reward([problem()] * 3, answers)))
    thread.start()
    thread.join(60)
    assert found == [1.0, 0.0, 1.0]
    assert time.monotonic() - begin < 30


def test_a_judge_that_dies_or_hangs_is_started_again() -> None:
    judge = Judge("tests.unit.mischief:judge", {"base": 1}, timeout_s=0.4)
    assert judge.scores([1, "die", 2, "hang", 3]) == [2.0, 0.0, 3.0, 0.0, 4.0]
    process = judge._process
    assert judge.scores(["slow", "memory", "fail", 4]) == [0.0, 0.0, 0.0, 5.0]
    assert judge._process is process, "these it survives"
    judge.stop()
    with pytest.raises(UserError, match=r"does not start: AttributeError: .*no attribute 'nothing'"):
        Judge("tests.unit.mischief:nothing").scores([1])


def test_answers_that_cannot_be_judged_are_told_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    judge = Judge("tests.unit.mischief:judge", {"base": 1}, timeout_s=0.4)
    assert judge.scores([1, "fail", "slow", "die", "fail"]) == [2.0, 0.0, 0.0, 0.0, 0.0]
    told = "2 made the judge fail, 1 took too long, 1 ended the judging process; such as 'fail', which made the judge fail: "
    assert f"{told}ValueError: fail\n" in capsys.readouterr().err
    assert judge.scores(["fail"] * 8) == [0.0] * 8, "a judge that has judged is not broken"
    assert capsys.readouterr().err == ""
    judge.stop()
    for name in ("fail", "die"):
        judge = Judge("tests.unit.mischief:judge", {"base": 1}, timeout_s=0.4)
        assert judge.scores([name] * 7) == [0.0] * 7, "few"
        with pytest.raises(UserError, match=rf"not one of 8 answers could be judged .* such as '{name}', which "):
            judge.scores([name] * 8)
        judge.stop()
    assert Judge("tests.unit.mischief:judge", {"base": 1}, timeout_s=0.05).scores(["slow"] * 8) == [0.0] * 8


def test_what_a_judge_tells_is_not_unpickled_nor_taken_for_another_answer(tmp_path: Path) -> None:
    judge = Judge("tests.unit.mischief:judge", {"base": 1}, timeout_s=0.4)
    assert judge.scores([mischief.Pickled(str(tmp_path / "made")), 1]) == [0.0, 2.0]
    assert list(tmp_path.iterdir()) == []
    assert judge.scores(["ahead", 2, 3]) == [0.0, 3.0, 4.0]
    judge.stop()


def test_format_is_of_the_whole_answer(tmp_path: Path) -> None:
    [(reward, weight)] = load_rewards(
        config({"reward": "format", "weight": 0.2, "args": {"pattern": "<think>.*</think>.*"}}), tmp_path
    )
    completions = ["<think>\na\n</think>\n18\n", "so <think>a</think>18", "<think>18", ""]
    assert (reward([problem()] * 4, completions), weight) == ([1.0, 0.0, 0.0, 0.0], 0.2)


def test_names_and_settings_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*rewards: Any) -> str:
        return "\n".join(reward_problems(config(*rewards), tmp_path))

    assert found("mth") == "train.grpo.rewards[0] (mth): no reward of that name; did you mean math?"
    assert "expected one of math, code, format, environment, or package.module:function" in found("zzz")
    assert found("format") == "train.grpo.rewards[0] (format): args.pattern: required, and not set"
    assert "no regular expression: missing )" in found({"reward": "format", "args": {"pattern": "("}})
    assert "args.timeout: unknown key (did you mean timeout_s?)" in found({"reward": "code", "args": {"timeout": 3}})
    assert "args.timeout_s: must be more than 0" in found({"reward": "code", "args": {"timeout_s": 0}})
    assert "args.x: unknown key" in found({"reward": "math", "args": {"x": 1}})
    assert found() == "train.grpo.rewards: the list is empty; name one reward, such as math"
    assert found("math", "math") == "train.grpo.rewards: math stands there twice"
    assert "every weight is 0" in found({"reward": "math", "weight": 0})
    with pytest.raises(UserError) as caught:
        load_rewards(config("mth", "format"), tmp_path)
    assert (str(caught.value).count("\n"), caught.value.exit_code) == (1, 2)
    monkeypatch.setattr(load, "has_package", lambda _: False)
    assert found("math") == "train.grpo.rewards[0] (math): math-verify is not installed: pip install 'preft[rl]'"


OWN = """
import helper_of_own_rewards

def texts(prompts, completions, answers, records):
    return [helper_of_own_rewards.half(p, c, a, r) for p, c, a, r in zip(prompts, completions, answers, records)]

def some(completions, **kwargs): return [len(kwargs)] * len(completions)
def scaled(completions, by): return [by] * len(completions)
def none(completions): return [None] * len(completions)
def short(completions): return [1.0]
def word(completions): return ["1"] * len(completions)
def number(completions): return 1.0
def fails(completions): return [1 / 0]
def leaves(completions): raise SystemExit(0)
def strange(completions, tokenizer): return []
async def later(completions): return []
class Called:
    def __call__(self, completions): return [3] * len(completions)
called = Called()
constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with functions; what the import leaves behind is taken away again."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "helper_of_own_rewards.py").write_text("def half(p, c, a, r): return 0.5 if c == a and r['x'] else p\n")
    (tmp_path / "broken_rewards.py").write_text("import sys\nx = 1 / 0\n")
    (tmp_path / "missing_rewards.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_rewards", "helper_of_own_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def call(root: Path, name: str, args: dict[str, Any] | None = None, n: int = 2) -> list[float | None]:
    [(reward, _)] = load_rewards(config({"reward": f"own_rewards:{name}", "args": args or {}}), root)
    return reward([problem("a", line, x=1) for line in range(1, n + 1)], ["a"] * n)


def test_a_function_by_dotted_path(own: Path) -> None:
    assert call(own, "texts") == [0.5, 0.5]
    assert call(own, "some") == [3.0, 3.0]  # prompts, answers and records
    assert call(own, "scaled", {"by": 7}) == [7.0, 7.0]
    assert call(own, "none") == [None, None]
    assert call(own, "called") == [3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "args", "found"),
    [
        ("own_rewards:text", {}, "own_rewards.py has no function text; did you mean texts?"),
        ("own_rewards:constant", {}, "has no function constant"),
        ("own_rewards:later", {}, "later is an async function"),
        ("own_rewards:strange", {}, "needs the argument tokenizer; it is called with the keywords prompts, "),
        ("own_rewards:scaled", {}, "needs the argument by"),
        ("own_rewards:none", {"by": 7}, "args.by: own_rewards:none takes no such argument"),
        ("own_rewards:some", {"completions": 7}, "args.completions: "),
        (":x", {}, "no name of a function; expected package.module:function"),
        ("own_rewards:", {}, "expected package.module:function"),
        ("own_rewards.py:texts:x", {}, "expected package.module:function"),
        ("own_rewardz:texts", {}, "there is no module own_rewardz: looked in "),
        ("broken_rewards:f", {}, "importing broken_rewards failed: ZeroDivisionError: division by zero ("),
        ("missing_rewards:f", {}, "importing missing_rewards failed: ModuleNotFoundError: No module named 'no_such"),
    ],
)
def test_functions_that_cannot_be_used(own: Path, name: str, args: dict[str, Any], found: str) -> None:
    (text,) = reward_problems(config({"reward": name, "args": args}), own)
    assert text.startswith(f"train.grpo.rewards[0] ({name}): ")
    assert found in text


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("short", "the reward own_rewards:short returned 1 numbers for 2 answers (to train.jsonl:1, train.jsonl:2)"),
        ("word", "the reward own_rewards:word returned str '1' for an answer to train.jsonl:1; expected a number or"),
        (
            "number",
            "the reward own_rewards:number returned float 1.0; expected a list with a number or None for each answer",
        ),
        (
            "fails",
            "the reward own_rewards:fails failed on answers to train.jsonl:1, train.jsonl:2: ZeroDivisionError: ",
        ),
        ("leaves", "the reward own_rewards:leaves failed on answers to train.jsonl:1, train.jsonl:2: SystemExit: 0 ("),
    ],
)
def test_functions_that_return_what_they_should_not(own: Path, name: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        call(own, name)
    assert str(caught.value).startswith(found)


def test_parts_add_up_by_weight() -> None:
    problems = [problem(line=line) for line in (1, 2, 3)]
    scores = score(problems, ["a"] * 3, [(Given(1.0, 0.5, None, name="a"), 1.0), (Given(0.0, 1.0, 1.0, name="b"), 0.2)])
    assert scores.total == [1.0, 0.7, 0.2]
    assert scores.parts == {"a": [1.0, 0.5, None], "b": [0.0, 1.0, 1.0]}
    assert scores.solved == [True, False, True]  # by the first that applies
    both = score(problems[:1], ["a"], [(Given(1.0, name="format"), 1.0), (Given(0.0, name="format"), 2.0)])
    assert both.parts == {"format": [1.0], "format 2": [0.0]}


def test_rewards_that_give_nothing_or_no_number() -> None:
    problems = [problem(line=line) for line in (1, 2)]
    with pytest.raises(UserError, match=r"^train.jsonl:2: no reward applies to an answer to it: a, b returned None"):
        score(problems, ["a"] * 2, [(Given(None, None, name="a"), 1), (Given(1.0, None, name="b"), 1)])
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"^train.jsonl:2: the reward given gave (nan|inf) to 'b'$"):
            score(problems, ["a", "b"], [(Given(1.0, bad), 1)])


def test_rewards_beyond_what_training_computes_with(own: Path) -> None:
    for value, weight in ((1e308, 1.0), (-1e308, 100.0), (3.0, 1e38)):
        with pytest.raises(
            UserError, match=r"^train.jsonl:1: the rewards, given above all, add up to -?[\d.einf+]+ for 'b'; "
        ):
            score([problem()], ["b"], [(Given(1.0, name="a"), 1.0), (Given(value), weight)])
    assert score([problem()], ["b"], [(Given(1e308), 0.0)]).total == [0.0]
    assert call(own, "scaled", {"by": -(10**400)}) == [float("-inf")] * 2


def test_a_verifier_that_never_fires(math_reward: MathReward) -> None:
    good, bad = [problem(str(n)) for n in range(4)], [problem("\\boxed{}", line) for line in range(9, 12)]
    rewards = [(math_reward, 1.0)]
    assert check_verifiers(good, rewards) == []
    (remark,) = check_verifiers(good + bad, rewards)
    assert remark.startswith(
        "the reward math gives less than 1 to 3 of 7 right answers that the problems have themselves"
    )
    assert "train.jsonl:9: question …'what is 9 + 9?', answer '\\\\boxed{}', reward 0." in remark
    with pytest.raises(UserError, match=r"3 of 3 right answers .* No answer could ever be rewarded"):
        check_verifiers(bad, rewards)
    assert check_verifiers([problem(None)], rewards) == []


def test_a_verifier_of_the_users_own_may_ask_for_another_form() -> None:
    own = Given(*[0.0] * 4, name="own:function")
    (remark,) = check_verifiers([problem()], [(own, 1.0)])
    assert remark.startswith("the reward own:function gives less than 1 to 1 of 1")
    assert check_verifiers([problem()], [(Given(0.0, name="format"), 1.0)]) == []


def test_a_verifier_that_does_not_apply_or_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    (remark,) = check_verifiers([problem()], [(Given(*[None] * 4, name="own:function"), 1.0)])
    assert remark.startswith("the reward own:function returns None, as if it did not apply, to 1 of 1 right answers")
    assert remark.endswith("answer '18', reward None.")
    some = Given(*[None] * 4, *[0.5] * 4, None, 1.0, None, None, name="own:function")
    (remark,) = check_verifiers([problem()] * 3, [(some, 1.0)])
    assert remark.startswith("the reward own:function gives less than 1, or None, to 2 of 3 right answers")
    assert "checking the rewards on right answers" in capsys.readouterr().err


def test_tests_that_their_own_solution_fails(tmp_path: Path) -> None:
    rewards = load_rewards(config("code"), tmp_path)
    right = problem(None, test_list=["assert f(2) == 4"], code="def f(x): return x * x")
    wrong = problem(None, 2, test_list=["assert f(2) == 5"], code="def f(x): return x * x")
    human_eval = problem(
        None,
        prompt="def f(x):\n    'square'\n",
        test="def check(c):\n    assert c(2) == 4\n",
        entry_point="f",
        canonical_solution="    return x * x\n",
    )
    assert check_verifiers([right, human_eval, problem(None, tests="assert True")], rewards) == []
    assert "to 1 of 2 right answers" in check_verifiers([right, wrong], rewards)[0]
    with pytest.raises(UserError, match="No answer could ever be rewarded"):
        check_verifiers([wrong], rewards)
    assert right_answers(problem(None), "code") == []


def test_the_best_constant_answer_to_mathematics(math_reward: MathReward) -> None:
    train = [problem("1/2"), problem("0.5"), problem("1/2"), problem("2"), problem("2"), problem("2")]
    held_out = [problem("1/2"), problem("0.5"), problem("3")]
    assert best_constant(Problems(train, held_out), math_reward) == ("1/2", 2 / 3)
    assert best_constant(Problems([problem(None)], held_out), math_reward) is None
    assert best_constant(Problems(train, held_out), Given(name="code")) is None
