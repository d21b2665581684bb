"""Memory over thousands of load and evict cycles, and what the pools waste: python -m tests.benchmarks.bench_pool_memory

Mixed ranks and module subsets, with pools that hold a sixth (device) and a third (host) of all adapters. Exit code 1 if a pool
is ever over its limit, or the process grows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.benchmarks import common, pool_cycles
from tests.benchmarks.material import Shape

GROWTH_BYTES = 64 << 20
"""Largest growth that passes. The allocator keeps what it was given back in parts, some MiB for each of the loading threads;
of what 2,000 cycles load it is far below 1%."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--copies", type=int, default=3, help="adapters of each kind")
    parser.add_argument("--folder", type=Path, help="where files are made; default: the system's temporary folder")
    options = parser.parse_args()
    if options.cycles < 2 * pool_cycles.SETTLED:
        parser.error(f"--cycles: at least {2 * pool_cycles.SETTLED}; growth counts from cycle {pool_cycles.SETTLED} on")
    shape = Shape.published(options.shape)
    with tempfile.TemporaryDirectory(prefix="bench-pool-", dir=options.folder) as folder:
        made = pool_cycles.make(shape, Path(folder), options.copies)
        tiers = pool_cycles.tiers_for(shape, made, common.device())
        common.say(f"{len(made)} adapters, {sum(one.weight_bytes for one in made) / 1e6:.0f} MB of weights")
        found = pool_cycles.run(tiers, made, options.cycles)
    growth = found.growth()
    grew = [name for name, by in growth.items() if by > GROWTH_BYTES]
    result = {
        **common.about("pool memory", **{name: str(value) for name, value in vars(options).items()}),
        "passed": not (grew or found.violations),
        "growth_bytes": growth,
        "growth_allowed_bytes": GROWTH_BYTES,
        "growth_of": f"largest figure after cycle {pool_cycles.SETTLED} over that at it, no load being on its way",
        "violations": found.violations,
        "waste": found.waste,
        "waste_of": "bytes in a pool over the bytes of A and B of each module at its own rank; 1: none",
        "counters": found.counters,
        # Against the host pool's capacity: the allocator of pinned memory may round a pool up by much.
        "pinned_memory": dict(torch.cuda.host_memory_stats()) if torch.cuda.is_available() else None,
        "samples": found.samples,
    }
    common.write(options.out, result)
    common.say(f"growth {growth}, waste {max(found.waste.values()):.4f} at most")
    if grew or found.violations:
        common.say(f"FAILED: {', '.join(grew) or 'no'} growth above the bound; {found.violations[:3]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
