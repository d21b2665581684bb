"""The table that people see at the end of a benchmark."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from preft_cli.bench.numbers import number, spread, tokens
from preft_cli.bench.results import ArmResult, BenchResult
from preft_cli.console import out, say, warn


def print_result(result: BenchResult) -> None:
    """Print arms, ratios and where the result lies; failures as warnings."""
    out.print(title(result), markup=False, highlight=False, soft_wrap=True)
    out.print(table(result))
    if result.config.bench.mode == "online":
        out.print(latency_table(result))
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
    prompts = bench.prompts.name if bench.prompts else f"{tokens(bench.prompt_len)} tokens"
    ranks = bench.rank if isinstance(bench.rank, list) else [bench.rank]
    return (
        f"{Path(result.model).name} on {result.device}, {bench.mode}: {bench.num_requests} requests of {prompts} +"
        f" {tokens(bench.output_len)} tokens,\n{bench.num_adapters} adapters of rank {', '.join(map(str, ranks))};"
        f" median of {bench.repeats} repetitions, ratios with their range"
    )


def table(result: BenchResult) -> Table:
    """One row an arm; narrow enough for 80 columns."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("arm", no_wrap=True)
    for heading in ("req/s", "tok/s", "vs base", "vs lora", "start", "failed"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, arm in result.arms.items():
        made.add_row(name, *cells(name, arm, result))
    return made


def latency_table(result: BenchResult) -> Table:
    """What users waited for, in milliseconds: medians over the repetitions."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("arm", no_wrap=True)
    for heading in ("ttft p50", "p99", "tpot p50", "p99", "end p50", "p99", "goodput"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, arm in result.arms.items():
        shown = [arm.latency(metric, at) for metric in ("ttft", "tpot", "e2el") for at in ("p50", "p99")]
        made.add_row(name, *("-" if one is None else number(one.median) for one in (*shown, arm.goodput)))
    return made


def cells(name: str, arm: ArmResult, result: BenchResult) -> list[str]:
    """The cells of one row after the arm's name."""
    return [
        number(arm.requests_per_second.median),
        number(arm.output_tokens_per_second.median),
        spread(result.ratios.get(f"{name}/base")),
        spread(result.ratios.get(f"{name}/lora")),
        f"{arm.started[0].start_seconds:.0f}s",
        str(arm.failures),
    ]
