"""The JSON schema of results: as the models give it, and as other tools use it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from preft_cli.bench import result_schema
from tests.unit.bench_results import make_result


def errors(document: Any) -> list[str]:
    validator = Draft202012Validator(json.loads(result_schema.text()))
    return [error.message for error in validator.iter_errors(document)]


@pytest.fixture
def document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(make_result(ttft_ms=300).model_dump_json())
    return made


def test_the_schema_file_is_fresh() -> None:
    written = result_schema.PATH.read_text(encoding="utf-8")
    assert written == result_schema.text(), "run: python -m preft_cli.bench.result_schema"


def test_results_validate(document: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(json.loads(result_schema.text()))
    assert errors(document) == []
    assert errors(json.loads(make_result().model_dump_json())) == []


@pytest.mark.parametrize("key", ["ratios", "arms", "schema_version", "config"])
def test_a_missing_key_does_not(document: dict[str, Any], key: str) -> None:
    del document[key]
    assert errors(document) == [f"'{key}' is a required property"]


def test_unknown_keys_and_other_versions_do_not(document: dict[str, Any]) -> None:
    assert "'path' was unexpected" in errors(document | {"path": "r.json"})[0]
    assert errors(document | {"schema_version": 3})
    document["arms"]["base"]["speed"] = 1
    assert "'speed' was unexpected" in errors(document)[0]
