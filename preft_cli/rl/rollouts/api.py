"""JSON over HTTP to a server of preft: one question, or many at once that end together."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from preft_cli.errors import UserError

CONNECT_S = 30.0
RETRY_AFTER_S = (0.2, 0.5, 1.0, 2.0, 3.0)
"""Pauses before the same request is sent again, where a connection was refused or reset: a proxy that starts anew, say.

Equal requests have equal answers: seeds are in them, and weights have digests.
"""
LOST = (ConnectionRefusedError, ConnectionResetError, BrokenPipeError)

MOST_AT_ONCE = 256
"""Connections; each takes a file descriptor here and there."""

KEY_VARIABLE = "VLLM_API_KEY"
"""The variable that vLLM's server itself takes its API key from."""


class Answer(NamedTuple):
    """What came back, if it was JSON."""

    status: int
    document: Any

    @property
    def error(self) -> str:
        """The server's own words: ours are `{"error": "..."}`, vLLM's `{"error": {"message": "..."}}`."""
        found = self.document.get("error", self.document) if isinstance(self.document, dict) else self.document
        found = found.get("message", found) if isinstance(found, dict) else found
        return found if isinstance(found, str) else json.dumps(found)


class Api:
    """The server at one address. Proxies are passed by: adapters reach it through memory or a shared folder."""

    def __init__(self, url: str) -> None:
        """Look at the address; nothing is sent.

        Raises:
            UserError: it is no address of a server.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urllib.parse.urlsplit(self.url)
            self._https, self._host, self._port, self._root = (
                parts.scheme == "https",
                parts.hostname,
                parts.port,
                parts.path,
            )
        except ValueError as error:
            raise UserError(f"{url!r} is not the address of a server: {error}", exit_code=2) from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise UserError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000", exit_code=2)

    def get(self, path: str, timeout_s: float = 60.0) -> Answer:
        """Ask for `path`.

        Raises:
            UserError: no answer, or none in JSON.
        """
        return _Call(self, "GET", path).run(time.monotonic() + timeout_s)

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Answer:
        """Send `body` to `path`; raises as `get` does."""
        return _Call(self, "POST", path, body).run(time.monotonic() + timeout_s)

    def post_all(self, path: str, bodies: Sequence[Any], timeout_s: float) -> list[Any]:
        """Send all `bodies` to `path` at once; the documents of the good answers, in order.

        With the first that fails, and with Ctrl-C, all others are hung up on, so that the server ends them too.

        Raises:
            UserError: one failed; with the server's own words.
        """
        calls = [_Call(self, "POST", path, body) for body in bodies]
        deadline = time.monotonic() + timeout_s
        with ThreadPoolExecutor(max(1, min(len(calls), MOST_AT_ONCE)), "preft-rollouts") as pool:
            futures = [pool.submit(call.good, deadline) for call in calls]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for call in calls:
                    call.hang_up()
                raise
        return [future.result() for future in futures]

    def connection(self) -> http.client.HTTPConnection:
        """A new one, not yet open."""
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(str(self._host), self._port, timeout=CONNECT_S)

    def target(self, path: str) -> str:
        """`path` on the server."""
        return f"{self._root}{path}"


class _Call:
    """One request on a connection of its own, which another thread may end."""

    def __init__(self, api: Api, method: str, path: str, body: Any = None) -> None:
        self._api, self._method, self._path, self._body = api, method, path, body
        self._connection, self._ended = api.connection(), threading.Event()

    def run(self, deadline: float) -> Answer:
        """Send it and wait until `deadline` (of `time.monotonic`)."""
        where = f"{self._api.url}{self._path}"
        try:
            status, body = self._persist(deadline)
        except TimeoutError as error:
            raise UserError(f"{where} gave no answer in time: the server hangs, or has too much to do") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(f"no server answers at {where}: {error or type(error).__name__}") from error
        finally:
            self._connection.close()
        if status == 401:
            raise UserError(f"{where} wants the server's API key: set {KEY_VARIABLE} to it, here as there")
        try:
            return Answer(status, json.loads(body))
        except ValueError as error:
            raise UserError(f"{where} answers {status}, and not as a server of preft does: {body[:200]!r}") from error

    def good(self, deadline: float) -> Any:
        """The document of a good answer."""
        answer = self.run(deadline)
        if answer.status != 200:
            raise UserError(f"{self._api.url}{self._path} answers {answer.status}: {answer.error}")
        return answer.document

    def _persist(self, deadline: float) -> tuple[int, bytes]:
        """Send it again where the connection is lost, unless we hung up."""
        for pause in RETRY_AFTER_S:
            try:
                return self._exchange(deadline)
            except LOST:
                self._connection.close()
                if time.monotonic() + pause > deadline or self._ended.wait(pause):
                    raise
        return self._exchange(deadline)

    def _exchange(self, deadline: float) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        connection = self._connection
        connection.connect()
        if self._ended.is_set():
            raise ConnectionAbortedError("hung up")
        connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
        data = None if self._body is None else json.dumps(self._body).encode()
        connection.request(self._method, self._api.target(self._path), data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def hang_up(self) -> None:
        """End it, wherever it is; its thread gets an error."""
        self._ended.set()
        if sock := self._connection.sock:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has ended by itself
