"""Parquet files, data sets of the Hub, and files that are neither: read alike, or refused by name."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.data import read_turns
from preft_cli.data.load import data_files
from preft_cli.data.read import read_data
from preft_cli.errors import UserError

CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
FORMS: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    {"instruction": "x", "input": "", "output": "y"},
    {"prompt": "x", "completion": "y"},
]


def parquet(path: Path, *records: dict[str, Any]) -> Path:
    columns = {key: None for record in records for key in record}
    pq.write_table(pa.Table.from_pylist([{**columns, **record} for record in records]), path)
    return path


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_turns(path)
    return str(caught.value)


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_case_6_every_form_loads_from_parquet_as_from_jsonl(tmp_path: Path, form: int) -> None:
    record = FORMS[form]
    (row,) = read_turns(parquet(tmp_path / "a.parquet", record))
    (line,) = read_turns(jsonl(tmp_path / "a.jsonl", record))
    assert (row.prompt, row.completion, row.tools) == (line.prompt, line.completion, line.tools)
    assert row.where == f"{tmp_path / 'a.parquet'}:row 1"


def test_forms_in_one_table_and_a_file_of_another_name(tmp_path: Path) -> None:
    """Rows of a table have the columns of all: those of other forms are null."""
    turns = read_turns(parquet(tmp_path / "data", *FORMS))
    assert [turn.completion for turn in turns] == ["y"] * 4
    assert turns[3].where.endswith(":row 4")


def test_tools_in_a_table_lose_the_nulls_that_the_table_added(tmp_path: Path) -> None:
    """Templates print definitions: a key of another tool would be one more argument."""

    def tool(**properties: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}

    def call(**arguments: Any) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    records = [
        {"messages": [CHAT[0], call(a=1)], "tools": [tool(a={"type": "integer"})]},
        {"messages": [CHAT[0], call(b="z")], "tools": [tool(b={"type": "string", "enum": ["z"]})]},
    ]
    rows = read_turns(parquet(tmp_path / "a.parquet", *records))
    lines = read_turns(jsonl(tmp_path / "a.jsonl", *records))
    assert [(row.tools, row.completion) for row in rows] == [(line.tools, line.completion) for line in lines]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"text": "x"}, 'row 1: found plain text ("text"): it has no prompt'),
        ({"messages": None}, 'row 1: "messages": found null'),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "row 1: message 2: "),
        ({"messages": [{"role": "user", "content": 7}]}, 'row 1: message 1: "content" is a number; expected text'),
        ({"messages": ["x"]}, "row 1: message 1: found text"),
        ({"messages": {"role": "user"}}, 'row 1: "messages": found an object; expected a list'),
        ({"prompt": b"x", "completion": "y"}, 'row 1: "prompt": found bytes; expected text'),
        ({"messages": CHAT, "tools": ["x"]}, 'row 1: "tools": tool 1: found text'),
        ({"x": 1}, 'row 1: found the key "x"; expected one of'),
    ],
)
def test_rows_that_are_wrong_are_named(tmp_path: Path, record: dict[str, Any], found: str) -> None:
    path = parquet(tmp_path / "a.parquet", record)
    assert refusal(path).startswith(f"{path}:{found}")


def test_files_that_hold_no_records(tmp_path: Path) -> None:
    empty, text = tmp_path / "empty.parquet", tmp_path / "text.parquet"
    empty.write_bytes(b"")
    text.write_text(json.dumps(FORMS[0]))
    for path in (empty, text):
        assert refusal(path).startswith(f"train.file: {path} cannot be read as Parquet: ")
    whole = parquet(tmp_path / "whole.parquet", *FORMS).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-9])
    assert "cut.parquet cannot be read as Parquet: " in refusal(tmp_path / "cut.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert "none.parquet has no rows; expected one of" in refusal(tmp_path / "none.parquet")
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(json.dumps(FORMS[0]).encode()))
    assert "data.jsonl.gz is compressed by gzip; unpack it first" in refusal(tmp_path / "data.jsonl.gz")
    for name, found in (
        ("data.txt", "is plain text: it has no prompt"),
        ("data.csv", "is a table of text; write it as"),
    ):
        (tmp_path / name).write_text("hello, world\n")
        assert f"{name} {found}" in refusal(tmp_path / name)
    (tmp_path / "folder.parquet").mkdir()
    assert "folder.parquet cannot be read: Is a directory" in refusal(tmp_path / "folder.parquet")


class Hub:
    """Data sets that are there, in place of `datasets.load_dataset`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, Any]]) -> None:
        import datasets

        def load_dataset(name: str, split: str) -> Any:
            if name != "owner/name" or split not in splits:
                raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.\nmore')
            return datasets.Dataset.from_list(splits[split])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_a_hub_id_and_its_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, train=[FORMS[3]], test=[FORMS[3], {"prompt": "x", "completion": None}], none=[])

    def read(split: str) -> Any:
        config = PreftConfig.model_validate({"train": {"file": "owner/name", "split": split}})
        return data_files(config, tmp_path)["train.file"].read()

    (turn,) = read("train")
    assert (turn.prompt, turn.completion, turn.where) == ("x", "y", "owner/name:row 1")
    with pytest.raises(UserError, match=r'^owner/name:row 2: "completion": found null; expected text$'):
        read("test")
    with pytest.raises(UserError, match=r"^train.file: split none of owner/name is empty$"):
        read("none")
    with pytest.raises(UserError) as caught:
        read("valid")
    assert f"owner/name is no file ({tmp_path}/owner/name does not exist), and its split valid cannot be had" in str(
        caught.value
    )
    assert "Should be one of ['train', 'test', 'none']. Check the name and train.split" in str(caught.value)


def test_what_is_on_this_machine_wins_and_missing_files_stay_files(tmp_path: Path) -> None:
    (tmp_path / "owner").mkdir()
    parquet(tmp_path / "owner" / "name", FORMS[3])
    assert read_data(Path("owner/name"), tmp_path, split="train")[0].where == f"{tmp_path}/owner/name:row 1"
    for name in ("data/train.jsonl", "data/train.parquet", "a/b/c", "../x/y", "/tmp/none/x"):
        with pytest.raises(UserError, match=r"does not exist$"):
            read_data(Path(name), tmp_path, split="train")
    with pytest.raises(UserError, match=r"^train.validation_file: .*other/name does not exist; .*alone take a Hub id"):
        read_data(Path("other/name"), tmp_path, "train.validation_file")


def test_offline_it_is_one_clear_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "preft.yaml").write_text("train: {file: owner/name-of-nothing}\n")
    done = subprocess.run(
        [sys.executable, "-m", "preft_cli", "train", "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    plan = json.loads(done.stdout)
    (problem,) = plan["problems"]
    assert problem.startswith(
        f"train.file: owner/name-of-nothing is no file ({tmp_path}/owner/name-of-nothing does not"
    )
    assert "give the path of a .jsonl or .parquet file" in problem
    assert plan["train_file"] == "owner/name-of-nothing"
    assert "Traceback" not in done.stderr
