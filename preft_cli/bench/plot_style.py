"""How pictures of benchmarks look, and what they say of themselves."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

from engine_patch.store.atomic import atomic_write
from preft_cli.bench.numbers import tokens
from preft_cli.bench.published import CAVEAT, SOURCE
from preft_cli.bench.results import BenchResult, Hardware
from preft_cli.config.schema import BenchConfig

COLOURS = {"base": "#6b6b6b", "lora": "#e69f00", "lorap": "#0072b2", "direft": "#cc79a7", "direftp": "#009e73"}
"""After Okabe and Ito: told apart also by colour-blind readers, and in print by their lightness."""

MARKERS = {"base": "s", "lora": "o", "lorap": "D", "direft": "v", "direftp": "^"}
"""A second mark beside the colour."""

INK, FAINT = "#222222", "#777777"
PUBLISHED_LABEL = f"published ({SOURCE})"
DPI = 120


def figure(width: float, height: float) -> Any:
    """A figure with the project's fonts; Figure alone, without pyplot, needs no display and keeps no global state."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def tidy(axes: Any, title: str, grid: str = "both") -> None:
    """Only the lines that help to read a value."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=INK, labelsize=9.5, length=3, color="#bbbbbb")
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def head(drawn: Any, result: BenchResult, *, swept: str = "", published: bool = False) -> None:
    """The title (model, hardware, date), what was measured below it, and at the foot what readers must know."""
    drawn.suptitle(title(result), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    foot = [workload(result, swept)] + ([CAVEAT] if published else [])
    drawn.supxlabel("\n".join(foot), x=0.01, ha="left", fontsize=8.5, color=FAINT)


def title(result: BenchResult) -> str:
    """`llama-3.1-8b (random weights), 1 x NVIDIA H200, 2026-05-14`."""
    name = Path(result.model.removeprefix("random:")).name
    weights = " (random weights)" if result.random_weights else ""
    return f"{name}{weights}, {machine(result.hardware, result.device)}, {result.created:%Y-%m-%d}"


def machine(hardware: Hardware, device: str) -> str:
    """The GPUs, or the processor where it was measured on that."""
    if device == "cpu" or not hardware.gpus:
        cpu = hardware.cpu.replace("(R)", "").replace("(TM)", "").partition("@")[0].strip()
        return f"{hardware.cores} cores of {cpu}"
    return ", ".join(f"{count} x {gpu}" for gpu, count in Counter(hardware.gpus).items())


def workload(result: BenchResult, swept: str = "") -> str:
    """One line about the requests; what is swept is not told, for it has an axis."""
    bench = result.config.bench
    told = {
        "mode": bench.mode,
        "num_requests": f"{bench.num_requests} requests",
        "prompt_len": "prompts from a file" if bench.prompts else f"prompts of {tokens(bench.prompt_len)} tokens",
        "output_len": f"outputs of {tokens(bench.output_len)}",
        "num_adapters": f"{bench.num_adapters} adapters",
        "rank": f"rank {bench.rank}",
        "max_num_seqs": at_once(bench),
        "repeats": f"median and range of {bench.repeats} repetitions" if bench.repeats > 1 else "one repetition",
    }
    return ", ".join(text for key, text in told.items() if key != swept)


def at_once(bench: BenchConfig) -> str:
    """How many requests there are at a time, and how they come."""
    if bench.mode == "online" and bench.load.request_rate:
        return f"open loop, {bench.load.request_rate:g} a second"
    if bench.mode == "online":
        return f"closed loop of {bench.load.max_concurrency or bench.max_num_seqs}"
    return f"at most {bench.max_num_seqs} at once"


def save(drawn: Any, path: Path) -> None:
    """Write the PNG aside, then rename."""
    picture = io.BytesIO()
    drawn.savefig(picture, format="png", dpi=DPI)
    atomic_write(path, [picture.getvalue()])
