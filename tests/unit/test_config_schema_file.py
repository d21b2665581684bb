"""The JSON schema for editors is the one that the models give."""

import json

from preft_cli.config import json_schema
from preft_cli.config.schema import PreftConfig


def test_the_schema_file_is_fresh() -> None:
    written = json_schema.PATH.read_text(encoding="utf-8")
    assert written == json_schema.text(), "run: python -m preft_cli.config.json_schema"


def test_the_schema_knows_every_section_and_refuses_others() -> None:
    schema = json.loads(json_schema.text())
    assert set(schema["properties"]) == set(PreftConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert all(model["additionalProperties"] is False for model in schema["$defs"].values())
