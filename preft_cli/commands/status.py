"""`preft status`: what a running server says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from preft_cli.commands.options import Config, Json, Set, load_config

if TYPE_CHECKING:
    from engine_patch.pool.counters import TierCounters
    from preft_cli.serving.status import ServerStatus


def command(
    config: Config = None,
    sets: Set = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="The server's address.", show_default="http:// serve.host : serve.port"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a running server whether the prompt rule is live in each of its processes.

    The exit code is 1 if no server answers, or if a process runs without the rule.
    """
    from preft_cli.commands.output import print_json
    from preft_cli.serving.status import fetch

    if url is None:
        serve = load_config(config, sets).config.serve
        url = f"http://{serve.host}:{serve.port}"
    status = fetch(url)
    if as_json:
        print_json(status)
    else:
        _print(url, status)
    if not status.live:
        raise typer.Exit(1)


def _print(url: str, status: ServerStatus) -> None:
    """Two lines for the server, one for the adapters of each worker, one for each process."""
    from preft_cli.console import out

    def line(text: str) -> None:
        out.print(text, markup=False, highlight=False, soft_wrap=True)

    adapters = status.adapters
    line(f"{url}: {'live' if status.live else 'NOT LIVE'}, preft {status.preft}, {status.vllm}")
    line(
        f"{adapters.listed} adapters listed, {adapters.admitted} asked for so far, {adapters.gpu_slots} slots;"
        f" prefix caching {'on' if status.prefix_caching else 'off'}"
    )
    for number, pools in enumerate(status.pools):
        tiers = [f"{name} {_tier(tier)}" for name, tier in (("device", pools.device), ("host", pools.host))]
        line(f"worker {number}: {'; '.join(tiers)}")
    for process in status.processes:
        missing = f", missing: {', '.join(process.missing)}" if process.missing else ""
        line(f"{'live' if process.live else 'NOT LIVE':8} process {process.pid}, {process.role}{missing}")


def _tier(tier: TierCounters) -> str:
    asked = tier.hits + tier.misses
    hits = f", {tier.hits / asked:.0%} hits" if asked else ""
    return f"{tier.used_bytes / 1e6:.1f} of {tier.capacity_bytes / 1e6:.1f} MB, {tier.adapters} adapters{hits}"
