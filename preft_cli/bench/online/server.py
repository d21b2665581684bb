"""The server's process, and requests to it beside the load."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
import urllib.request
from typing import Any

from engine_patch.errors import PreftError
from preft_cli.bench.online.command import HOST
from preft_cli.errors import UserError
from preft_cli.serving.launch import healthy

POLL_S = 0.1
STOP_S = 30.0
"""Seconds that the server has to take down its engine before it is killed."""

RESET_S = 10.0
"""Seconds in which the engine must have let go of the blocks of requests that have ended."""

ANSWER_S = 120.0
"""How long a request to the server may take; `/server_info` runs a dozen programs to describe the machine."""


class Server:
    """A child in this process' own group, so that whoever ends the group ends the server too."""

    def __init__(self, command: list[str], port: int) -> None:
        """Start it. Its output goes where ours does."""
        self.url = f"http://{HOST}:{port}"
        bypass_proxies()
        self._process = subprocess.Popen(
            command, env=server_environment(), stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )

    def wait_ready(self) -> None:
        """Return when `/health` is good. How long that may take is left to vLLM, which gives up on an engine that hangs.

        Raises:
            UserError: the server ended before.
        """
        while not healthy(self.url):
            if (code := self._process.poll()) is not None:
                raise UserError(f"the server ended with exit code {code} before it was ready; its messages are above")
            time.sleep(POLL_S)

    def get(self, path: str) -> bytes:
        """The body of a good answer.

        Raises:
            UserError: there is none.
        """
        return self._ask(urllib.request.Request(self.url + path))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            UserError: the server does not answer.
            PreftError: it could not.
        """
        deadline = time.monotonic() + RESET_S
        while not self._reset():
            if time.monotonic() > deadline:
                raise PreftError("the engine did not empty its prefix cache: something still holds blocks of it")
            time.sleep(POLL_S)

    def _reset(self) -> bool:
        answer: Any = json.loads(self._ask(urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")))
        return bool(answer["success"])

    def _ask(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                body: bytes = answer.read()
                return body
        except (http.client.HTTPException, OSError) as error:  # urllib's errors are OSErrors
            code = self._process.poll()
            ended = "" if code is None else f"; it has ended with exit code {code}"
            raise UserError(f"no good answer from the server at {request.full_url}: {error}{ended}") from error

    def stop(self) -> None:
        """Ask it to end, and kill it with all its processes when it does not. Again does no harm."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            from vllm.utils.system_utils import kill_process_tree

            kill_process_tree(self._process.pid)
            self._process.wait()


def server_environment() -> dict[str, str]:
    """This process' environment, for the server.

    Development mode, in every arm alike, gives the routes that reset the prefix cache and tell the resolved settings. A key
    for the API would lock our own load out.
    """
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    return {**kept, "VLLM_SERVER_DEV_MODE": "1"}


def bypass_proxies() -> None:
    """Reach this machine directly, whatever proxy the environment names; vLLM's load generator reads it too."""
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if exempt != "*" and HOST not in exempt.split(","):
        os.environ["no_proxy"] = f"{exempt},{HOST}".lstrip(",")
