"""How fast adapters move between file, host and device, beside a copy, `dd` and vLLM: python -m tests.benchmarks.bench_paging

No server and no engine. For each shape and rank, with all seven linear modules of all layers in bfloat16:

host_to_slot/copy        time until kernels can use an adapter from pinned memory, over one `copy_` of as many bytes
stock/host_to_slot       time of vLLM's `activate_adapter` for the same adapter, over ours
file_to_host/dd          bandwidth from a cold file to verified bytes in pinned memory, over that of `dd` on such a file
stock_load/file_to_host  time of vLLM's loader from a cold PEFT folder to packed pinned tensors, over ours
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import common, disk
from tests.benchmarks.common import over_cases, quotients, say, spread
from tests.benchmarks.material import Shape, random_adapter, write_both
from tests.benchmarks.paging_case import Case, Times
from tests.benchmarks.stock_lora import distributed

RATIOS = ("host_to_slot/copy", "stock/host_to_slot", "file_to_host/dd", "stock_load/file_to_host")
READS = RATIOS[2:]


def measure(shape: Shape, rank: int, options: argparse.Namespace, config: Any) -> dict[str, Any]:
    """All figures of one shape and rank."""
    with tempfile.TemporaryDirectory(prefix="bench-paging-", dir=options.folder) as folder:
        made = (random_adapter(shape.base, shape.modules, rank, seed) for seed in range(options.files))
        refs, folders = write_both(made, Path(folder))
        sizes = {ref.path.stat().st_size for ref in refs}
        if len(sizes) > 1:
            raise RuntimeError("files of one kind have different sizes: `dd` would read another amount")
        case = Case(shape, rank, refs, folders, config, common.device())
        moved = case.transfers(options.repeats)
        cold, warm, cached = case.reads(options.reads)
    was_cold = [share <= disk.COLD_SHARE for share in cached]
    ratios = {
        "host_to_slot/copy": quotients(moved["host_to_slot"], moved["copy"]),
        "stock/host_to_slot": quotients(moved["stock"], moved["host_to_slot"]),
        **_read_ratios({name: _chosen(values, was_cold) for name, values in cold.items()}),
    }
    return {
        "shape": shape.name,
        "rank": rank,
        "adapter_bytes": case.num_bytes,
        "file_bytes": sizes.pop(),
        "distinct_adapters": options.files,
        "adapters_on_device": case.resident,
        "seconds": {"moved": moved, "cold": cold, "warm": warm},
        "median_gb_per_s": {
            **{name: _rate(case.num_bytes, moved[name]) for name in ("host_to_slot", "copy", "stock")},
            **{f"{name} cold": _rate(case.num_bytes, values) for name, values in cold.items()},
            **{f"{name} warm": _rate(case.num_bytes, values) for name, values in warm.items()},
        },
        "cached_share_before_cold_read": cached,
        "repetitions_cold": sum(was_cold),
        "ratios": ratios,
        "ratios_warm": _read_ratios(warm),
        "ratio_spreads": {name: spread(values) for name, values in ratios.items() if values},
    }


def _read_ratios(times: Times) -> dict[str, list[float]]:
    """Of bandwidths for `dd`, whose files are as large; of times for vLLM, whose file has the same weights."""
    return {
        "file_to_host/dd": quotients(times["dd"], times["file_to_host"]),
        "stock_load/file_to_host": quotients(times["stock_load"], times["file_to_host"]),
    }


def _chosen(values: list[float], wanted: list[bool]) -> list[float]:
    return [value for value, take in zip(values, wanted, strict=True) if take]


def _rate(num_bytes: int, values: list[float]) -> float:
    return round(num_bytes / 1e9 / spread(values)["median"], 3)


def notes(cases: list[dict[str, Any]]) -> list[str]:
    """What a reader of the numbers must know."""
    found = [common.RATIOS_SAID, "cold reads count in the ratios, and only where all sides' files were cold"]
    if common.device().type == "cpu":
        found.append("no GPU: host_to_slot/copy and stock/host_to_slot are of CPU tensors and only show that this runs")
        found.append("no pinned memory: vLLM's loader copies its tensors once where it would pin them")
    if any(case["repetitions_cold"] < len(case["cached_share_before_cold_read"]) for case in cases):
        found.append("some files could not be taken out of the page cache, such as on tmpfs: see repetitions_cold")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--shapes", default="qwen2.5-0.5b,llama-3.1-8b")
    parser.add_argument("--ranks", default="8,64")
    parser.add_argument("--folder", type=Path, default=Path(), help="where files are made: on the disk to be measured")
    parser.add_argument("--files", type=int, default=6, help="distinct adapters of each kind, at least 4")
    parser.add_argument("--repeats", type=int, default=40, help="repetitions from host to device")
    parser.add_argument("--reads", type=int, default=9, help="repetitions from disk to host, cold and warm")
    options = parser.parse_args()
    if options.files < 4:
        parser.error("--files: at least 4, so that no adapter is resident when its turn comes")
    cases = []
    with distributed() as config:
        for shape in map(Shape.published, options.shapes.split(",")):
            for rank in map(int, options.ranks.split(",")):
                cases.append(measure(shape, rank, options, config))
                medians = {name: round(of["median"], 3) for name, of in cases[-1]["ratio_spreads"].items()}
                say(f"{shape.name} rank {rank}: {medians}")
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    settings = {name: str(value) for name, value in vars(options).items()}
    result = {
        **common.about("paging", **settings),
        "ratios": {name: over_cases([case["ratios"][name] for case in cases]) for name in RATIOS},
        "ratios_warm": {name: over_cases([case["ratios_warm"][name] for case in cases]) for name in READS},
        "notes": notes(cases),
        "cases": cases,
    }
    common.write(options.out, result)


if __name__ == "__main__":
    main()
