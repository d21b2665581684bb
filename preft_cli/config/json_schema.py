"""The JSON schema of `preft.yaml`, for completion and checks in editors.

python -m preft_cli.config.json_schema      # writes templates/preft.schema.json
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from preft_cli.config.schema import PreftConfig

PATH = Path(__file__).resolve().parents[2] / "templates" / "preft.schema.json"


def text() -> str:
    """The schema as it is written to `PATH`."""
    schema = PreftConfig.model_json_schema()
    for name in PreftConfig.model_fields:  # `train:` with nothing below it stands for the defaults
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
    document: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps({**document, "title": "preft.yaml"}, indent=2) + "\n"


def main() -> None:
    """Write the schema: aside, then renamed."""
    aside = PATH.with_suffix(".tmp")
    aside.write_text(text(), encoding="utf-8")
    os.replace(aside, PATH)  # noqa: PTH105 - the contract of atomic writes is os.replace
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
