"""The JSON schema of a benchmark's result, for whoever reads results with other tools.

python -m preft_cli.bench.result_schema      # writes templates/bench-result.schema.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_patch.store.atomic import atomic_write
from preft_cli.bench.results import BenchResult

PATH = Path(__file__).resolve().parents[2] / "templates" / "bench-result.schema.json"


def text() -> str:
    """The schema as it is written to `PATH`."""
    schema = BenchResult.model_json_schema(mode="serialization")
    schema["required"] = list(schema["properties"])  # also the version, which has a default
    document: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps({**document, "title": "result of preft bench"}, indent=2) + "\n"


def main() -> None:
    """Write the schema."""
    atomic_write(PATH, [text().encode()])
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
