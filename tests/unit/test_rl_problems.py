"""Data rows to problems of RL, and rows that cannot be judged: each named before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.load import load_problems
from preft_cli.rl.problem import Problem, Problems
from preft_cli.rl.rewards.needs import reward_names
from preft_cli.rl.rewards.programs import code_tests, setup_of, whole_program
from preft_cli.rl.text import behind_hashes, boxed, python_code, tagged

USER = {"role": "user", "content": "what is 9 + 9?"}
GSM8K = {"question": "what is 9 + 9?", "answer": "9 + 9 = <<9+9=18>>18\n#### 18"}
MATH = {"problem": "what is $x$?", "solution": "first \\boxed{1}, so $\\boxed{\\frac{1}{2}}$", "level": "5"}
MBPP = {"text": "square it", "code": "def f(x): return x * x", "test_list": ["assert f(2) == 4"], "test_setup_code": ""}
HUMAN_EVAL = {
    "prompt": "import math\n\n\ndef f(x):\n    'the root'\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
    "entry_point": "f",
    "canonical_solution": "    return math.isqrt(x)\n",
}


def config(file: str = "train.jsonl", held_out: str | None = None, **grpo: Any) -> PreftConfig:
    train = {"task": "grpo", "file": file, "grpo": grpo}
    return PreftConfig.model_validate({"train": train, "eval": {"file": held_out}})


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def load(folder: Path, *records: Any, **grpo: Any) -> Problems:
    write(folder / "train.jsonl", *records)
    return load_problems(config(**grpo), folder)


def one(folder: Path, record: dict[str, Any], **grpo: Any) -> Problem:
    (problem,) = load(folder, record, **grpo).train
    return problem


def refusal(folder: Path, *records: Any, **grpo: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, *records, **grpo)
    return str(caught.value).replace(f"{folder}/", "")


def test_chats_and_plain_text(tmp_path: Path) -> None:
    answered = [USER, {"role": "assistant", "content": "18"}]
    for record in (
        {"messages": [USER], "answer": 18},
        {"messages": answered, "answer": 18},
        {"prompt": answered, "answer": 18},
    ):
        problem = one(tmp_path, record)
        assert not isinstance(problem.prompt, str)
        assert [(message.role, message.content) for message in problem.prompt] == [("user", USER["content"])]
        assert (problem.answer, problem.where) == ("18", f"{tmp_path}/train.jsonl:1")
    problems = load(tmp_path, {"prompt": "9 + 9 =", "answer": "18", "more": [1]})
    assert (problems.train[0].prompt, problems.train[0].record["more"]) == ("9 + 9 =", [1])
    assert any("plain text and gets no chat template" in remark for remark in problems.remarks)


@pytest.mark.parametrize(
    ("record", "asked", "answer"),
    [
        (GSM8K, "what is 9 + 9?\n\nPut your final answer within \\boxed{}.", "18"),
        ({"question": "which?", "answer": "Paris"}, "which?\n\nPut", "Paris"),
        (MATH, "what is $x$?\n\nPut", "\\frac{1}{2}"),
        ({"problem": "x", "answer": "7", "solution": "\\boxed{8}"}, "x\n\nPut", "7"),
        (MBPP, "square it\n\nThe code must pass these tests:\n\n```python\nassert f(2) == 4\n```", None),
        ({**MBPP, "text": None, "prompt": "cube it"}, "cube it\n\nThe code", None),
        (HUMAN_EVAL, "Complete this function.\n\n```python\nimport math\n\n\ndef f(x):\n    'the root'\n```", None),
        ({**GSM8K, "prompt": [USER]}, "what is 9 + 9?", "18"),
    ],
)
def test_question_sets_become_chats(tmp_path: Path, record: dict[str, Any], asked: str, answer: str | None) -> None:
    problem = one(tmp_path, record, rewards=["math" if answer else "code"])
    (message,) = problem.prompt
    assert not isinstance(message, str)
    assert message.role == "user"
    assert message.text.startswith(asked)
    assert problem.answer == answer
    if record is GSM8K:
        assert problem.record["solution"] == GSM8K["answer"]


def test_tables_have_nulls_in_columns_of_other_forms(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [GSM8K, MATH, {"messages": [USER], "answer": "18"}]
    columns = {key: None for row in rows for key in row}
    pq.write_table(pa.Table.from_pylist([{**columns, **row} for row in rows]), tmp_path / "a.parquet")
    problems = load_problems(config("a.parquet"), tmp_path)
    assert [problem.answer for problem in problems.train] == ["18", "\\frac{1}{2}", "18"]
    assert problems.train[0].record["solution"] == GSM8K["answer"]
    assert problems.train[1].where == f"{tmp_path}/a.parquet:row 2"


def test_a_row_without_the_answer_field_is_named_with_its_line(tmp_path: Path) -> None:
    rows = [GSM8K, {"question": "x"}, {"question": "x", "answer": " "}, {"question": "x", "answer": ["18"]}]
    needs = 'the reward math needs an "answer" (text or a number), or a "solution" with \\boxed{…}; '
    assert refusal(tmp_path, *rows).split("\n") == [
        f"train.jsonl:2: {needs}the row has none",
        f'train.jsonl:3: {needs}"answer" is empty',
        f'train.jsonl:4: {needs}"answer" is a list',
    ]
    assert refusal(tmp_path, {"problem": "x", "solution": "it is 7"}).startswith("train.jsonl:1: the reward math needs")
    assert refusal(tmp_path, *rows[1:2] * 25).count("\n") == 20
    assert refusal(tmp_path, *rows[1:2] * 25).endswith("… and 5 more")
    empty = {**MBPP, "test_list": []}
    assert 'code needs "tests", "test_list" or' in refusal(tmp_path, empty, rewards=["code"])
    assert '"test_list" is an empty list' in refusal(tmp_path, empty, rewards=["code"])


def test_rows_of_several_kinds_need_what_one_reward_needs(tmp_path: Path) -> None:
    assert len(load(tmp_path, GSM8K, MBPP, rewards=["math", "code"]).train) == 2
    assert "train.jsonl:1: the reward math needs" in refusal(tmp_path, MBPP, rewards=["math", "format"])
    assert len(load(tmp_path, {"prompt": "x"}, rewards=["my.own:function"]).train) == 1
    assert reward_names(config()) == ["math"]
    assert reward_names(config(environment="gcd")) == ["environment"]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ([1], "found a list; expected"),
        ({"x": 1}, 'found the key "x"; expected {"messages": …, "answer": …}'),
        ({"messages": []}, '"messages": found an empty list; expected a list of messages'),
        ({"messages": [{"role": "system", "content": "x"}]}, "a message of role 'system' at the end; expected one of"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message of the user"),
        ({"messages": [{"role": "user", "content": 7}]}, 'message 1: "content" is a number'),
        ({"prompt": "  ", "answer": "1"}, '"prompt" is empty'),
        ({"question": 7, "answer": "1"}, '"question": found a number; expected text'),
        ({"messages": [USER], "answer": "1", "images": ["x"]}, 'found "images"'),
        ({"messages": [USER], "answer": "1", "tools": [{"x": 1}]}, 'found "tools"'),
    ],
)
def test_rows_that_pose_no_problem(tmp_path: Path, record: Any, found: str) -> None:
    text = refusal(tmp_path, GSM8K, record)
    assert text.startswith("train.jsonl:2: ")
    assert found in text


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^train.file: .*/train.jsonl does not exist$"):
        load_problems(config(), tmp_path)
    assert "train.jsonl is empty; expected one JSON object on each line" in refusal(tmp_path)
    (tmp_path / "a.txt").write_text("what is 9 + 9?")
    with pytest.raises(UserError, match="is plain text: a problem needs what its answers are judged by"):
        load_problems(config("a.txt"), tmp_path)


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    other = {"question": "what is 1 + 1?", "answer": "2"}
    write(tmp_path / "train.jsonl", GSM8K, other)
    write(tmp_path / "test.jsonl", GSM8K)
    problems = load_problems(config(held_out="test.jsonl"), tmp_path)
    assert [problem.answer for problem in problems.train] == ["2"]
    assert [problem.where for problem in problems.held_out] == [f"{tmp_path}/test.jsonl:1"]
    assert problems.remarks == ["train.file: 1 problems are also in eval.file and not trained on"]
    assert load_problems(config(), tmp_path).remarks == [
        "eval.file is not set: accuracy on held-out problems is not measured"
    ]
    write(tmp_path / "train.jsonl", GSM8K)
    with pytest.raises(UserError, match=r"every problem of it is also in eval\.file"):
        load_problems(config(held_out="test.jsonl"), tmp_path)
    write(tmp_path / "test.jsonl", other, {"question": "x"})
    with pytest.raises(UserError, match=r"test\.jsonl:2: the reward math needs"):
        load_problems(config(held_out="test.jsonl"), tmp_path)


def test_gsm8k_by_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has several configurations, and a split of its own to hold out."""
    import datasets

    def load_dataset(name: str, configuration: str | None = None, *, split: str) -> Any:
        if configuration is None:
            raise ValueError("Config name is missing.\nPlease pick one among ['main', 'socratic']\nExample of usage:")
        assert (name, configuration) == ("openai/gsm8k", "main")
        return datasets.Dataset.from_list([{**GSM8K, "question": f"{split}?"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = config("openai/gsm8k", "openai/gsm8k").model_dump(mode="json")
    with pytest.raises(UserError, match=r"missing\. Please pick one among \['main', 'socratic'\]\. .*train\.split"):
        load_problems(PreftConfig.model_validate(found), tmp_path)
    found["train"]["split"], found["eval"]["split"] = "main/train", "main/test"
    problems = load_problems(PreftConfig.model_validate(found), tmp_path)
    assert problems.train[0].where == "openai/gsm8k:row 1"
    for (problem,), split in ((problems.train, "train"), (problems.held_out, "test")):
        assert repr(problem.prompt).count(f"{split}?") == 1


def test_settings_of_an_environment_that_is_not_there(tmp_path: Path) -> None:
    remarks = load(tmp_path, GSM8K, worked_examples=3, train_problems=1000).remarks
    assert [remark.partition(" is")[0] for remark in remarks] == ["train.grpo.worked_examples", "eval.file"]


def test_where_answers_stand() -> None:
    assert behind_hashes("#### 17\n#### 18 \nmore") == "18"
    assert (behind_hashes("18"), behind_hashes("####")) == (None, None)
    assert boxed("\\boxed{1} \\boxed{\\frac{1}{2}} }") == "\\frac{1}{2}"
    assert boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert (boxed("\\boxed{1"), boxed("\\boxed{}"), boxed("1")) == (None, None, None)
    assert tagged("<answer> 1 </answer> <answer>\n2\n</answer>") == "2"
    assert tagged(" 2 ") == "2"
    assert python_code("```python\na\n```\nand\n```py\nb\n```\n```sh\nc\n```") == "b\n"
    assert python_code("```\na\n```") == "a\n"
    assert python_code("so\n```python\ncut") == "cut"
    assert python_code("a") == "a"


def test_tests_of_question_sets() -> None:
    assert code_tests(MBPP) == ["assert f(2) == 4"]
    assert code_tests({"tests": "assert True"}) == ["assert True"]
    assert code_tests(HUMAN_EVAL) == [HUMAN_EVAL["test"] + "\ncheck(f)\n"]
    assert [code_tests(record) for record in ({}, {"tests": []}, {"tests": [1]}, {"tests": [" "]})] == [[]] * 4
    assert setup_of({"test_imports": ["import math"], "test_setup_code": "x = 1"}) == "import math\nx = 1"
    stub = HUMAN_EVAL["prompt"]
    assert whole_program(HUMAN_EVAL, "    return 2\n") == stub + "    return 2\n"
    assert whole_program(HUMAN_EVAL, "def f(x):\n    return 2\n") == "import math\n\n\n\ndef f(x):\n    return 2\n"
    assert whole_program(MBPP, "code") == "code"
