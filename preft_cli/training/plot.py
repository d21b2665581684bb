"""The loss curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"held-out": "tab:red", "validation": "tab:green"}


def plot_losses(rows: list[dict[str, Any]], path: Path, title: str, kept_step: int) -> None:
    """Draw the losses of `Metrics.rows` to a PNG: training, and each measured split with the base model's line.

    `kept_step` is marked: the adapter of that step is the one that is saved.
    """
    # Figure alone, without pyplot, needs no display and keeps no global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    train = [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, label="training")
    for split, (base, curve) in split_curves(rows).items():
        colour = COLOURS[split]
        if base is not None:
            axes.axhline(base, color=colour, alpha=0.5, linestyle="--", label=f"{split}, base model: {base:.2f}")
            curve = {0: base} | curve
        if curve:
            label = f"{split}, adapter: {curve.get(kept_step, [*curve.values()][-1]):.2f}"
            axes.plot(list(curve), list(curve.values()), color=colour, marker="o", linestyle=":", label=label)
    axes.axvline(kept_step, color="black", linewidth=0.8, label=f"kept: step {kept_step}")
    axes.set(xlabel="step", ylabel="loss per completion token (nats)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    aside = path.with_name(f".{path.name}.tmp")
    figure.savefig(aside, format="png", dpi=120)
    aside.replace(path)


def split_curves(rows: list[dict[str, Any]]) -> dict[str, tuple[float | None, dict[int, float]]]:
    """By split, the base model's loss and the adapter's by step, in the order of the steps."""
    curves: dict[str, tuple[float | None, dict[int, float]]] = {}
    for row in sorted((row for row in rows if row["kind"] == "eval"), key=lambda row: int(row["step"])):
        base, adapter = curves.get(row["split"], (None, {}))
        if row["which"] == "base":
            curves[row["split"]] = (row["loss"], adapter)
        else:
            curves[row["split"]] = (base, adapter | {row["step"]: row["loss"]})
    return curves
