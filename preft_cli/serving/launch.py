"""Run the server as a child process: start it, say when it is ready, pass Ctrl-C on, and leave nothing behind."""

from __future__ import annotations

import http.client
import os
import signal
import socket
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
from typing import TYPE_CHECKING

from engine_patch.manifest import Manifest
from engine_patch.rule import is_prefill_only
from preft_cli.console import progress, say, warn
from preft_cli.errors import UserError
from preft_cli.serving.adapters import Served, choose, template_digest
from preft_cli.serving.plan import ServePlan

if TYPE_CHECKING:
    from preft_cli.models import BaseModel

STOP_TIMEOUT_S = 20.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(plan: ServePlan) -> int:
    """Serve every adapter of the plan's folder until a signal comes; the exit code of the server.

    Raises:
        UserError: no such folder, no base model, vLLM is missing, the port is taken, or the server did not come up.
    """
    if plan.backend == "none":
        raise UserError("vLLM is not installed: pip install 'preft[cpu]'")
    for number in SIGNALS:  # a shell's background jobs start with Ctrl-C ignored, a server must not be
        signal.signal(number, signal.default_int_handler)
    require_free_port(plan.host, plan.port)
    base, served, reserved = _prepare(plan)
    with tempfile.TemporaryDirectory(prefix="preft-serve-", dir=_links_beside(plan.adapters)) as folder:
        manifest = Path(folder) / "manifest.json"
        what = Manifest(
            adapters=served.adapters,
            store=plan.adapters.absolute(),
            reserved=reserved,
            base_names=[plan.base],
            base=base.fingerprint.to_dict(),
            chat_template=served.template_digest,
        )
        manifest.write_text(what.model_dump_json())
        all_token = any(not is_prefill_only(adapter.method) for adapter in served.adapters.values())
        arguments = plan.arguments(str(base.path), served.max_lora_rank, served.gpu_pool, all_token)
        command = [sys.executable, "-m", "engine_patch.server", str(manifest), *arguments]
        return _run(command, {**os.environ, **_defaults(plan.environment), "PREFT_END_WITH_STDIN": "1"}, plan.url)


def _links_beside(adapters: Path, memory: Path = Path("/dev/shm")) -> Path | None:
    """Where links to the adapters in use can lie: with adapters in memory there, too, since links reach no other file system.

    None: in the usual place for temporary files.
    """
    return memory if memory.is_dir() and memory.stat().st_dev == adapters.stat().st_dev else None


def _defaults(environment: dict[str, str]) -> dict[str, str]:
    """The plan's variables, except where the person has set them."""
    return {key: value for key, value in environment.items() if key not in os.environ}


def require_free_port(host: str, port: int) -> None:
    """Find out now, not after a minute of loading, and never take another server's answer for ours.

    Raises:
        UserError: the address is not this machine's, or something listens there.
    """
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port") from error


def _prepare(plan: ServePlan) -> tuple[BaseModel, Served, list[str]]:
    """The base model, the adapters to serve, and the names that two of them claim."""
    from preft_cli.convert.collect import collect
    from preft_cli.models import resolve
    from preft_cli.models.cache import cache_dir

    if not plan.adapters.is_dir():
        raise UserError(
            f"{plan.adapters}: no such folder; give --adapters DIR, or fill it with preft convert. An empty one will do "
            f"(mkdir {plan.adapters}): adapters that come into it while the server runs are served, those of an RL run too"
        )
    base = resolve(plan.base, plan.root)
    cache = cache_dir() / "serve"
    collected = collect(plan.adapters.absolute(), base, cache, plan.file_cache, declared=plan.residual_stream)
    served = choose(collected, plan, template_digest(base, plan.chat_template))
    for path, reason in served.rejected:
        warn(f"not serving {path}: {reason}")
    names = ", ".join(sorted(served.adapters)[:10]) + (", ..." if len(served.adapters) > 10 else "")
    say(f"base model {plan.base}, {len(served.adapters)} adapters from {plan.adapters}: {names or 'none'}")
    return base, served, collected.reserved


def _run(command: list[str], environment: dict[str, str], url: str) -> int:
    """Start the server in a process group of its own and wait for its end."""
    # The open pipe on its standard input tells the server that this process is alive.
    child = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.PIPE)
    ended = threading.Event()
    with _forward_signals(child) as stopping:
        threading.Thread(target=_announce, args=(url, child, ended), daemon=True).start()
        try:
            code = child.wait()
        finally:
            ended.set()
            _kill_group(child)
        if code in (0, -signal.SIGINT, -signal.SIGTERM) and stopping:
            say("server stopped")
            return 0
        if len(stopping) > 1:
            raise UserError("the server was killed before it had stopped by itself")
        raise UserError(f"the server ended with exit code {code}; its messages are above", 2 if code == 2 else 1)


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

    before = {number: signal.signal(number, forward) for number in SIGNALS}
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
    try:
        with progress("starting the server", unit="s") as bar:
            while not healthy(url):
                if ended.wait(0.5) or child.poll() is not None:
                    raise _ServerEndedError
                bar.update(round(time.monotonic() - began))
    except _ServerEndedError:
        return
    say(f"ready: {url}/v1 (Ctrl-C stops it)")


class _ServerEndedError(Exception):
    """The child ended before it was ready; the progress line must not say done."""


def healthy(url: str) -> bool:
    """Whether the server at `url` says that it is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False
