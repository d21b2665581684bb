"""The end of an RL run, for people."""

from __future__ import annotations

from preft_cli.console import duration
from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.rl.result import RlResult
from preft_cli.rl.summary import RunSummary
from preft_cli.training.report import about, memory, print_run, where


def print_result(result: RlResult) -> None:
    """A table of the run, one that compares it with earlier ones, and where each artefact lies, on stderr."""
    print_run(result, facts(result))


def facts(result: RlResult) -> dict[str, str]:
    """The rows of the table."""
    summary = result.summary
    found = about(result)
    found["problems"] = found.pop("rows")
    if summary.reward_first is not None and summary.reward_last is not None:
        found["reward"] = (
            f"{summary.reward_first:.3f} in the first ten steps, {summary.reward_last:.3f} in the last ten"
        )
    if result.held_out:
        found |= _accuracy(result.held_out)
    found |= _steps(summary)
    speed = f"{summary.generated_tokens_per_s:.0f} tokens/s sampled"
    found["speed"] = f"{speed}, {result.dtype} on {where(result)}, {duration(result.seconds)}"
    return found | memory(result)


def _accuracy(held_out: HeldOutAccuracy) -> dict[str, str]:
    """With 95% intervals."""
    difference = held_out.difference
    dropped = f", {held_out.dropped} longer ones dropped" if held_out.dropped else ""
    told = {
        "held-out accuracy": f"of {held_out.rows} problems{dropped}, with 95% intervals",
        "  base model": held_out.base.text(),
        "  adapter": held_out.adapter.text(),
        "  difference": f"{difference.text()}; {difference.only_adapter} solved by the adapter alone, "
        f"{difference.only_base} by the base model alone",
    }
    if held_out.constant:
        told["  best constant answer"] = held_out.constant.text() + (
            "" if held_out.beats_constant else "; the adapter does no better"
        )
    return told


def _steps(summary: RunSummary) -> dict[str, str]:
    """Where the time of a step went, and whether the steps were sound."""
    told: dict[str, str] = {}
    if shares := summary.shares:
        parts = {name: getattr(shares, name) for name in ("generation", "training", "rewards", "sync", "rest")}
        told["time of a step"] = ", ".join(f"{name} {share:.1%}" for name, share in parts.items())
    if sync := summary.sync:
        told["weight sync"] = (
            f"{sync.median_ms:.2f} ms (median of {sync.number}), {sync.largest_ms:.2f} ms at most, "
            f"{sync.num_bytes / 1e6:.2f} MB each"
        )
    if summary.logprob_gap_mean is not None:
        most = "" if summary.logprob_gap_max is None else f", {summary.logprob_gap_max:.3f} at most"
        told["trainer and engine"] = f"log-probabilities differ by {summary.logprob_gap_mean:.4f} nats{most}"
    if summary.tied_share is not None:
        without = (
            f"; {summary.steps_without_signal} steps had nothing to learn from" if summary.steps_without_signal else ""
        )
        told["groups that tie"] = f"{summary.tied_share:.0%}: all answers earned the same{without}"
    if summary.cut_share:
        told["answers cut"] = f"{summary.cut_share:.1%}, at train.grpo.max_completion_length"
    return told
