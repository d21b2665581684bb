"""From what the blocks measured to one result for each arm."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from preft_cli.bench.arms import BASE
from preft_cli.bench.plan import ArmPlan, BenchPlan
from preft_cli.bench.ratios import quotients, same_seed
from preft_cli.bench.results import AdapterSet, ArmResult, BlockRun, Counters, EngineRun, Repetition, Spread
from preft_cli.bench.worker import SHOWN_FAILURES

SAME = 0.05
"""The same requests once more may take so much less or more time, as a share, before it is worth a word."""


def arm_results(
    plan: BenchPlan, blocks: Sequence[BlockRun], adapters: Mapping[str, AdapterSet | None]
) -> dict[str, ArmResult]:
    """The result of each arm, with the better of the settings that were tried.

    Args:
        adapters: of each arm; None for an arm without.
    """
    tried: dict[str, list[ArmResult]] = {}
    for arm in plan.arms:
        runs = [block.engines[arm.name] for block in blocks if arm.name in block.engines]
        tried.setdefault(arm.arm, []).append(arm_result(arm, runs, adapters[arm.arm]))
    base = tried[BASE][0].repetitions
    return {name: better(results, base) for name, results in tried.items()}


def better(results: Sequence[ArmResult], base: Sequence[Repetition]) -> ArmResult:
    """Of the settings that were tried for one arm the one that was faster beside the base arm, with all that failed.

    Not the one with the higher rate: the machine may have been slower while it was its turn.
    """

    def over_base(one: ArmResult) -> float:
        values = quotients(one.arm, BASE, {one.arm: one.repetitions, BASE: base})
        return statistics.median(values) if values else 0.0

    if len(results) == 1:
        return results[0]
    return max(results, key=over_base).model_copy(
        update={
            "tried": {name: rate for one in results for name, rate in one.tried.items()},
            "failures": sum(one.failures for one in results),
            "failed": [reason for one in results for reason in one.failed][:SHOWN_FAILURES],
        }
    )


def arm_result(arm: ArmPlan, runs: Sequence[EngineRun], adapters: AdapterSet | None) -> ArmResult:
    """What one engine did in all blocks, with the statistics of its repetitions."""
    repetitions = [one for run in runs for one in run.repetitions]
    rates = Spread.of([one.requests_per_second for one in repetitions])
    counted = Counters.total([one.counters for one in repetitions])
    return ArmResult(
        arm=arm.arm,
        description=arm.description,
        variant=arm.variant,
        tried={} if arm.variant is None else {arm.variant: rates},
        engine_args=arm.engine_args,
        environment=arm.environment,
        adapters=adapters,
        started=[one for run in runs for one in run.started],
        repetitions=repetitions,
        again=[one for run in runs for one in run.again],
        requests_per_second=rates,
        output_tokens_per_second=Spread.of([one.tokens_per_second for one in repetitions]),
        seconds=Spread.of([one.seconds for one in repetitions]),
        preemptions=counted.preemptions,
        prefix_cache_hit_rate=counted.prefix_cache_hits / max(1, counted.prefix_cache_queries),
        adapter_loads=counted.adapter_loads,
        failures=sum(run.failures for run in runs),
        failed=[reason for run in runs for reason in run.failed][:SHOWN_FAILURES],
        logs=sorted({run.log for run in runs}),
    )


def second_times(arms: Mapping[str, ArmResult]) -> dict[str, float]:
    """For each arm, the speed of the same requests the second time over the first."""
    found = {name: same_seed(arm.repetitions, arm.again) for name, arm in arms.items()}
    return {name: value for name, value in found.items() if value is not None}


def measured_notes(plan: BenchPlan, arms: Mapping[str, ArmResult], second: Mapping[str, float]) -> list[str]:
    """What the measurement itself has to say."""
    found = [
        f"{name}: the same requests once more were {abs(value - 1):.0%} {'faster' if value > 1 else 'slower'};"
        " a cache was warm, or the machine is noisy"
        for name, value in second.items()
        if abs(value - 1) > SAME
    ]
    if plan.mode == "online" and plan.load.request_rate:
        found.append(
            f"open loop at {plan.load.request_rate:g} requests a second: no arm can answer more, so compare latencies and"
            " goodput, not ratios of throughput"
        )
    for name, arm in arms.items():
        if arm.preemptions:
            found.append(
                f"{name}: {arm.preemptions} preemptions; the KV cache does not hold all requests that run at once"
            )
        if len(arm.tried) > 1:
            rates = ", ".join(f"{variant} {rate.median:.1f} req/s" for variant, rate in arm.tried.items())
            found.append(f"{name}: {rates}; the better one counts")
    return found
