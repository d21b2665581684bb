"""The kernels for adapters in a pool beside vLLM's for stacked arrays, on one GPU: python -m tests.benchmarks.bench_lora_kernels

Both sides do the same work on the same weights, for the fused linear layers of one decoder layer, each captured in a CUDA
graph, so that the device's time is measured. Sides alternate. The L2 cache is overwritten before each measurement, as the
rest of a model would overwrite it.

The engine adds to gate and up within the activation behind them: `activation` is the time of that, `activation_alone` of the
activation without adapters.

`host_us_a_call` is what a call of the custom op takes the host, whatever the device does.

An intervention on the residual stream has nothing to be compared with in vLLM. It stands beside the addition of two tensors of
its size: nothing that reads hidden and residual and writes hidden takes less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine_patch.kernels.reference import scale_to_bits
from tests.benchmarks import common
from tests.lora_pool import Layer, Step, add, add_silu_and_mul, inputs, make_stream

MODELS = {
    "Qwen2.5-0.5B": {"hidden": 896, "intermediate": 4864, "q": 896, "kv": 128},
    "Llama-3.1-8B": {"hidden": 4096, "intermediate": 14336, "q": 4096, "kv": 1024},
}


@dataclass(frozen=True)
class Case:
    """A step: `tokens` tokens spread evenly over `adapters` adapters of rank `rank`, in an engine of `max_rank`."""

    step: str
    tokens: int
    adapters: int
    rank: int
    max_rank: int


CASES = [
    *(Case("prefill", 8192, 32, rank, max_rank) for rank, max_rank in ((8, 8), (64, 64), (8, 64))),
    *(
        Case("decode", 256, adapters, rank, max_rank)
        for adapters in (32, 256)
        for rank, max_rank in ((8, 8), (64, 64), (8, 64))
    ),
]


def linear_layers(model: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """For each fused linear layer of a decoder layer: in_features and its slices' widths."""
    sizes = MODELS[model]
    hidden, intermediate, q, kv = (sizes[name] for name in ("hidden", "intermediate", "q", "kv"))
    return {
        "qkv": (hidden, (q, kv, kv)),
        "o": (q, (hidden,)),
        "gate_up": (hidden, (intermediate, intermediate)),
        "down": (intermediate, (hidden,)),
    }


def is_gated(widths: tuple[int, ...]) -> bool:
    """Whether these are gate and up, whose adapters act within the activation."""
    return len(widths) == 2


@dataclass(frozen=True)
class Stacked:
    """vLLM's layout: for each slice `[slots, 1, max_rank, in_features]` and `[slots, 1, width, max_rank]`, padded with zeros."""

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]


def make_stacked(case: Case, in_features: int, widths: tuple[int, ...], dtype: torch.dtype) -> Stacked:
    a, b = [], []
    for width in widths:
        down = torch.zeros(case.adapters, 1, case.max_rank, in_features, dtype=dtype, device="cuda")
        up = torch.zeros(case.adapters, 1, width, case.max_rank, dtype=dtype, device="cuda")
        down[:, :, : case.rank].normal_(std=in_features**-0.5)
        up[..., : case.rank].normal_(std=case.rank**-0.5)
        a.append(down)
        b.append(up)
    return Stacked(tuple(a), tuple(b))


def to_pool(case: Case, stacked: Stacked, in_features: int, widths: tuple[int, ...]) -> Layer:
    """The same adapters in a pool, each slice's A of all adapters and then B; the sizes here keep offsets aligned."""
    table = torch.zeros(case.adapters, len(widths), 4, dtype=torch.int64)
    parts, offset = [], 0
    for index, (down, up) in enumerate(zip(stacked.a, stacked.b, strict=True)):
        a = down[:, 0, : case.rank].reshape(case.adapters, -1)
        b = up[:, 0, :, : case.rank].transpose(1, 2).reshape(case.adapters, -1)
        for column, part in enumerate((a, b)):
            table[:, index, column] = offset + torch.arange(case.adapters) * part.size(1)
            offset += part.numel()
            parts.append(part.flatten())
    table[:, :, 2] = case.rank
    table[:, :, 3] = scale_to_bits(1.0)
    starts = [sum(widths[:index]) for index in range(len(widths))]
    slices = torch.tensor(list(zip(starts, widths, strict=True)), dtype=torch.int32, device="cuda")
    return Layer(torch.cat(parts), table.cuda(), slices, in_features, widths, case.max_rank)


def stock(y: torch.Tensor, x: torch.Tensor, stacked: Stacked, metadata: tuple[torch.Tensor, ...]) -> None:
    """What vLLM's `add_lora_linear` does."""
    from vllm.lora.ops.triton_ops import lora_expand, lora_shrink

    shape = (len(stacked.b), x.size(0), stacked.b[0].size(-1))
    buffer = torch.empty(shape, dtype=torch.float32, device=x.device)
    lora_shrink(x, list(stacked.a), buffer, *metadata, 1.0)
    lora_expand(buffer, list(stacked.b), y, *metadata, offset_start=0, add_inputs=True)


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    for _ in range(2):  # compiles, and copies vLLM's pointers to the device
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def measure(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each replay, for each side; the first one alternates."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for repeat in range(repeats + 3):
        for name in sorted(graphs, reverse=repeat % 2 == 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            begin.record()
            graphs[name].replay()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [1000 * begin.elapsed_time(end) for begin, end in pairs[3:]] for name, pairs in events.items()}


def summary(times: list[float]) -> dict[str, float]:
    """Median and the quartiles around it."""
    low, median, high = statistics.quantiles(times, n=4)
    return {"median_us": round(median, 2), "quartile1_us": round(low, 2), "quartile3_us": round(high, 2)}


def slots_of(case: Case) -> torch.Tensor:
    return torch.arange(case.tokens, device="cuda") * case.adapters // case.tokens


def stock_metadata(case: Case) -> tuple[torch.Tensor, ...]:
    """vLLM's own, of the same step."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    meta = LoRAKernelMeta.make(case.adapters, case.tokens, device="cuda")
    meta.prepare_tensors(slots_of(case))
    result: tuple[torch.Tensor, ...] = meta.meta_args(case.tokens, False)
    return result


def compare(case: Case, in_features: int, widths: tuple[int, ...], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Times of both sides on one linear layer, and how far apart their results are."""
    from vllm.lora.ops.triton_ops import utils

    for cache in (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT):  # keyed by addresses, which are used again here
        cache.clear()
    stacked = make_stacked(case, in_features, widths, dtype)
    layer = to_pool(case, stacked, in_features, widths)
    step, metadata = Step(layer, slots_of(case)), stock_metadata(case)
    y, x = inputs(layer, case.tokens)
    of_pool, of_stock = y.clone(), y.clone()
    add(of_pool, x, step)
    stock(of_stock, x, stacked, metadata)
    apart = (of_pool.float() - of_stock.float()).abs().max() / of_stock.float().abs().max()
    graphs = {
        "pool": capture(lambda: add(of_pool, x, step)),
        "stock": capture(lambda: stock(of_stock, x, stacked, metadata)),
    }
    if is_gated(widths):
        graphs["activation"] = capture(lambda: add_silu_and_mul(of_pool, x, step))
        none = Step(layer, torch.full((case.tokens,), -1, device="cuda"))
        graphs["activation_alone"] = capture(lambda: add_silu_and_mul(of_pool, x, none))
    times = measure(graphs, repeats)
    found: dict[str, Any] = {name: summary(of_side) for name, of_side in times.items()}
    return {**found, "largest_difference": round(apart.item(), 6)}


def intervene(case: Case, width: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Times of the interventions of a step on a stream, and of the addition that bounds them."""
    layer = replace(make_stream(width, [case.rank] * case.adapters, dtype, device="cuda"), max_rank=case.max_rank)
    layer.pool.mul_(0.01)  # each replay changes hidden, which must stay finite
    step = Step(layer, slots_of(case))
    hidden, residual = inputs(layer, case.tokens)
    stream = torch.empty_like(hidden)
    graphs = {
        "pool": capture(lambda: add(hidden, residual, step)),
        "bound": capture(lambda: torch.add(hidden, residual, out=stream)),
    }
    times = measure(graphs, repeats)
    assert hidden.isfinite().all()
    return {name: summary(of_side) for name, of_side in times.items()}


def host_cost(case: Case, in_features: int, widths: tuple[int, ...], dtype: torch.dtype, repeats: int) -> float:
    """Microseconds that the host takes for one call of the custom op, its two launches included."""
    layer = to_pool(case, make_stacked(case, in_features, widths, dtype), in_features, widths)
    step, (y, x) = Step(layer, slots_of(case)), inputs(layer, case.tokens)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):  # fewer than the device's queue holds
            add(y, x, step)
        times.append((time.perf_counter() - began) / 20 * 1e6)
    return round(statistics.median(times), 1)


def run_interventions(models: list[str], dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    results = []
    for model in models:
        for case in CASES:
            if case.step == "prefill":
                width = MODELS[model]["hidden"]
                found = intervene(case, width, dtype, repeats)
                results.append({"model": model, **asdict(case), "width": width, **found})
                print(f"{model} {case}: {found}", file=sys.stderr, flush=True)
    return results


def run(models: list[str], dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    results = []
    for model in models:
        for case in CASES:
            layers = {
                name: compare(case, in_features, widths, dtype, repeats)
                for name, (in_features, widths) in linear_layers(model).items()
            }
            total = {
                side: round(sum(of_layer[side]["median_us"] for of_layer in layers.values()), 2)
                for side in ("pool", "stock")
            }
            gated = layers["gate_up"]
            within = gated["activation"]["median_us"] - gated["activation_alone"]["median_us"]
            total["pool_within_activation"] = round(total["pool"] - gated["pool"]["median_us"] + within, 2)
            results.append({"model": model, **asdict(case), "layers": layers, "sum_of_medians_us": total})
            print(f"{model} {case}: {total}", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--only", choices=["linear", "interventions"], help="default: both")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="default: all")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    settings = options.model or list(MODELS), getattr(torch, options.dtype), options.repeats
    few = Case("prefill", 1024, 4, 8, 8)
    results = {
        "host_us_a_call": host_cost(few, *linear_layers(settings[0][0])["o"], settings[1], options.repeats),
        "results": run(*settings) if options.only != "interventions" else [],
        "interventions": run_interventions(*settings) if options.only != "linear" else [],
    }
    about = common.about("adapter kernels", dtype=options.dtype, repeats=options.repeats)
    text = json.dumps({**about, "gpu": torch.cuda.get_device_name(), **results}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
