"""`preft serve` as a child process, for tests that ask it over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running `preft serve` and what it said."""

    def __init__(self, folder: Path, log: Path, *settings: str, environment: dict[str, str] | None = None) -> None:
        """Start it with the adapters of `folder` and `settings` (`serve.dtype=float32`)."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        options = [word for setting in settings for word in ("--set", setting)]
        command = ["serve", "--adapters", str(folder), "--port", str(self.port), *options]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "preft_cli", *command],
                stderr=file,
                stdout=file,
                cwd=folder.parent,
                env={**os.environ, **(environment or {})},
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.get("/health") is None:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()}")

    def get(self, path: str, payload: dict[str, Any] | None = None) -> Any:
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def chat(self, model: str, text: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.get("/v1/chat/completions", {"model": model, "messages": messages, "temperature": 0, **options})


def metric(server: Server, name: str) -> float:
    """The sum of a metric of vLLM."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Instead of a pause, which is too short on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
