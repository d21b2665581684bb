"""Rollouts from a running `preft serve`, on other GPUs or another host.

New weights go into the adapters folder that the server watches, as a `.preft` file that is written aside and renamed: in /dev/shm
they go through memory, on a shared file system to other hosts. The next request after the server was seen to serve their digest
is answered with them, and from KV that is keyed by it; requests that run end on the former ones, or are ended.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine_patch.adapter_routes import PREFIX
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.store import check_name
from engine_patch.store.file import read_header, write_adapter
from engine_patch.store.format import SUFFIX
from preft_cli.console import say
from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling, Synced
from preft_cli.rl.rollouts.answers import require_room
from preft_cli.rl.rollouts.api import Answer, Api
from preft_cli.rl.rollouts.seeds import prompt_seed
from preft_cli.rl.rollouts.start import SOURCE, base_name, require_fit, require_ours
from preft_cli.rl.rollouts.tokens_route import GENERATE, GREEDY_BELOW, parameters, read_answers
from preft_cli.serving.status import fetch

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter, LowRankPair

SAY_AFTER_S = 5.0


class ServerRollouts:
    """`Rollouts` from a server."""

    def __init__(
        self,
        url: str,
        store: Path,
        adapter_name: str,
        method: str,
        base: BaseFingerprint,
        trained_in: str,
        in_flight: Literal["finish", "abort"] = "finish",
        dtype: str | None = None,
        *,
        timeout_s: float = 3600.0,
        sync_timeout_s: float = 90.0,
    ) -> None:
        """Look at the server and the folder; nothing is written yet.

        Args:
            url: of the server, such as `http://127.0.0.1:8000`.
            store: the server's adapters folder, as this machine sees it.
            adapter_name: under which the weights are served.
            method: of the adapter, such as `lorap`.
            base: the base model that is trained.
            trained_in: what the trainer computes in, such as `float32`.
            in_flight: what becomes of requests for the former weights when new ones arrive.
            dtype: of the weights in the store; None: the server's.
            timeout_s: for all answers of one `generate`.
            sync_timeout_s: in which the server must have seen new weights; shared file systems may take their time.

        Raises:
            UserError: no such server or folder, a server of another base model or without what rollouts need, a name that
                no adapter may have or that is somebody's adapter.
        """
        try:
            check_name(adapter_name)
        except PreftError as error:
            raise UserError(str(error), exit_code=2) from error
        self._api = Api(url)
        self._file = store.absolute() / f"{adapter_name}{SUFFIX}"
        require_ours(self._file)
        status = fetch(self._api.url, "train.grpo.rollout_url")
        require_fit(self._api.url, status, base, trained_in)
        self._base_name = base_name(self._api)
        self._name, self._method, self._base, self._in_flight = adapter_name, method, base, in_flight
        self._dtype, self._max_model_len = dtype or status.engine.dtype, status.engine.max_model_len
        self._timeout_s, self._sync_timeout_s = timeout_s, sync_timeout_s
        self._digest: str | None = None
        """Of the weights that were synchronised last."""

    def sync(self, pairs: Mapping[str, LowRankPair]) -> Synced:
        """See `Rollouts.sync`."""
        began = time.perf_counter()
        adapter = self._adapter(pairs)
        try:
            header = write_adapter(self._file, adapter)
        except OSError as error:
            raise UserError(f"cannot write {self._file}: {error.strerror}; see train.grpo.rollout_store") from error
        self._digest = header.digest
        self._wait_until_served(header.digest)
        if self._in_flight == "abort":
            self._good(self._api.post(f"{self._route}/abort"))
        return Synced(header.digest, time.perf_counter() - began, header.num_bytes)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int, *, adapted: bool = True
    ) -> list[list[Rollout]]:
        """See `Rollouts.generate`. All prompts are sent at once; the server decides how many it computes together."""
        if adapted and self._digest is None:
            raise RuntimeError("no weights to sample with: sync comes before generate")
        require_room(prompts, sampling, self._max_model_len, f"the server at {self._api.url}")
        model = self._name if adapted else self._base_name
        drawn = 1 if sampling.temperature < GREEDY_BELOW else n
        bodies = [
            {
                "model": model,
                "token_ids": list(prompt),
                "sampling_params": parameters(drawn, sampling, prompt_seed(seed, index)),
            }
            for index, prompt in enumerate(prompts)
        ]
        documents = self._api.post_all(GENERATE, bodies, self._timeout_s)
        answers = [read_answers(document, drawn) * (n // drawn) for document in documents]
        if adapted:
            self._require_served()
        return answers

    def stop(self) -> None:
        """Take our file out of the server's folder; the server runs on."""
        try:
            if self._digest and read_header(self._file).digest == self._digest:
                self._file.unlink()
        except (PreftError, OSError):
            return  # gone already, or the folder is

    @property
    def _route(self) -> str:
        return f"{PREFIX}/{urllib.parse.quote(self._name)}"

    def _adapter(self, pairs: Mapping[str, LowRankPair]) -> Adapter:
        import torch

        from engine_patch.adapter import DTYPES, Adapter

        dtype = DTYPES[self._dtype]
        with torch.no_grad():
            held = {name: pair.map(lambda tensor: tensor.detach().to("cpu", dtype)) for name, pair in pairs.items()}
        try:
            return Adapter(self._method, self._base, held, {"source": SOURCE})
        except PreftError as error:
            raise UserError(str(error)) from error

    def _wait_until_served(self, digest: str) -> None:
        """Return when the next request is answered with the content `digest`."""
        began, pause, said = time.monotonic(), 0.005, False
        while (found := self._ask())[0] != digest:
            waited = time.monotonic() - began
            if waited > self._sync_timeout_s:
                raise UserError(
                    f"the server at {self._api.url} does not serve what was written to {self._file} (digest {digest[:12]}) after"
                    f" {waited:.0f} s: {found[1].rstrip('.')}. Is train.grpo.rollout_store its --adapters folder, and if the"
                    " server is on another host, a file system that both share?"
                )
            if waited > SAY_AFTER_S and not said:
                say(f"waiting for {self._api.url} to see {self._file}: {found[1]}")
                said = True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def _require_served(self) -> None:
        """Refuse answers that may be from other weights than ours."""
        found, said = self._ask()
        if found != self._digest:
            raise UserError(
                f"somebody else replaced or removed {self._file} while answers were sampled ({said}); two runs need two adapter"
                " names (adapter.name)"
            )

    def _ask(self) -> tuple[str | None, str]:
        """The digest of what the server serves under our name, and that in words."""
        answer = self._api.get(self._route)
        if answer.status == 404 and isinstance(answer.document, dict) and "error" in answer.document:
            return None, f"it says: {answer.error}"
        document = self._good(answer)
        return document["digest"], f"it serves {self._name} from {document['path']}, digest {document['digest'][:12]}"

    def _good(self, answer: Answer) -> Any:
        if answer.status == 200 and isinstance(answer.document, dict) and {"digest", "name"} <= answer.document.keys():
            return answer.document
        raise UserError(f"the server at {self._api.url} does not serve {self._file}: {answer.error}")
