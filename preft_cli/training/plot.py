"""The loss curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_losses(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training loss, held-out loss and the base model's line from `Metrics.rows` to a PNG."""
    # Figure alone, without pyplot, needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    train = [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]
    held_out = [(row["step"], row["loss"]) for row in rows if row.get("which") == "adapter"]
    base = next((row["loss"] for row in rows if row.get("which") == "base"), None)
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, label="training")
    if base is not None:
        axes.axhline(base, color="tab:gray", linestyle="--", label=f"held-out, base model: {base:.2f}")
        held_out = [(0, base), *held_out]
    if held_out:
        label = f"held-out, adapter: {held_out[-1][1]:.2f}"
        axes.plot(*zip(*held_out, strict=True), color="tab:red", marker="o", linestyle=":", label=label)
    axes.set(xlabel="step", ylabel="loss per completion token (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    aside = path.with_name(f".{path.name}.tmp")
    figure.savefig(aside, format="png", dpi=120)
    aside.replace(path)
