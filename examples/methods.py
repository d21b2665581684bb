"""Puts the results of several training runs into one table and one JSON file; examples/methods.sh calls it.

python examples/methods.py runs/methods/*/*/result.json --out examples/results/methods.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KEPT = ("method", "ranks", "parameters", "trainable_parameters", "steps", "rows", "train_loss", "held_out", "seconds")
SHARED = ("base_model", "dtype", "device", "seed", "versions", "hardware")


def row(result: dict[str, Any]) -> dict[str, Any]:
    """What differs from run to run."""
    held_out, settings = result["held_out"], result["config"]["train"]
    return {
        "persona": Path(settings["file"]).parent.name,
        **{key: result[key] for key in KEPT},
        "relative_change": round(held_out["adapter"] / held_out["base"] - 1, 6),
        "git_commit": result["git_commit"],
        "learning_rate": settings["learning_rate"],
        "batch_size": settings["batch_size"],
    }


def main() -> None:
    """Read, print, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("results", nargs="+", type=Path, metavar="result.json")
    arguments.add_argument("--out", type=Path, metavar="FILE.json")
    arguments.add_argument("--command", help="The command that made the runs; recorded.")
    options = arguments.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    rows = [row(result) for result in results]
    print(f"{'persona':<10}{'method':<15}{'parameters':>12}{'base':>8}{'adapter':>9}{'change':>9}")
    for one in rows:
        losses = f"{one['held_out']['base']:>8.2f}{one['held_out']['adapter']:>9.2f}{one['relative_change']:>+9.1%}"
        print(f"{one['persona']:<10}{one['method']:<15}{one['trainable_parameters']:>12,}{losses}")
    if options.out:
        shared = {key: results[0][key] for key in SHARED}
        document = {"schema_version": 1, "benchmark": "methods", "command": options.command, **shared, "runs": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
