"""The table that people see at the end of a benchmark."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from preft_cli.bench.results import ArmResult, BenchResult, Spread
from preft_cli.console import out, say, warn


def print_result(result: BenchResult) -> None:
    """Print arms, ratios and where the result lies; failures as warnings."""
    out.print(title(result), markup=False, highlight=False, soft_wrap=True)
    out.print(table(result))
    for note in result.notes:
        say(f"note: {note}")
    for name, arm in result.arms.items():
        for reason in arm.failed:
            warn(f"{name}: {reason}")
    if result.failures:
        warn(f"{result.failures} requests failed: these numbers are not to be used")
    if result.path is not None:
        say(f"result: {result.path}")


def title(result: BenchResult) -> str:
    """Two lines: what was asked of whom."""
    bench = result.config.bench
    prompts = bench.prompts.name if bench.prompts else f"{length(bench.prompt_len)} tokens"
    ranks = bench.rank if isinstance(bench.rank, list) else [bench.rank]
    return (
        f"{Path(result.model).name} on {result.device}, {bench.mode}: {bench.num_requests} requests of {prompts} +"
        f" {length(bench.output_len)} tokens,\n{bench.num_adapters} adapters of rank {', '.join(map(str, ranks))};"
        f" median of {bench.repeats} repetitions, ratios with their range"
    )


def length(tokens: int | list[int]) -> str:
    """`64`, or `8 to 512`."""
    return f"{tokens[0]} to {tokens[1]}" if isinstance(tokens, list) else str(tokens)


def table(result: BenchResult) -> Table:
    """One row an arm; narrow enough for 80 columns."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("arm", no_wrap=True)
    for heading in ("req/s", "tok/s", "vs base", "vs lora", "start", "failed"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, arm in result.arms.items():
        made.add_row(name, *cells(name, arm, result))
    return made


def cells(name: str, arm: ArmResult, result: BenchResult) -> list[str]:
    """The cells of one row after the arm's name."""
    return [
        speed(arm.requests_per_second.median),
        speed(arm.output_tokens_per_second.median),
        ratio(result.ratios.get(f"{name}/base")),
        ratio(result.ratios.get(f"{name}/lora")),
        f"{arm.started[0].start_seconds:.0f}s",
        str(arm.failures),
    ]


def speed(value: float) -> str:
    """Three digits or more."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def ratio(value: Spread | None) -> str:
    """`1.23 (1.20-1.31)`, or a dash where there is nothing to compare with."""
    return "-" if value is None else f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"
