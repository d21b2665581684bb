"""An adapter of an engine in this process, whose weights a trainer replaces between two steps, without any file.

    live = LiveAdapter(llm, "policy", "lorap", base)
    live.sync(pairs)
    llm.generate(prompts, sampling, lora_request=live.request)

The trainer's own tensors go to free pages of the engine's pool on its device. From the next request on the new version acts; a
request in flight ends on the version that it began with, or is aborted.

Upstream: base weights can come from memory, adapters from files alone. Needed: adapters from memory too. Still fits while an
engine core in this process is `LLM.llm_engine.engine_core.engine_core`, its one worker is called directly, and requests are
aborted by their internal ids (`contract.LIVE_SYMBOLS`).
"""

from __future__ import annotations

import itertools
import secrets
import time
import weakref
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from engine_patch import contract
from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.pool.live import LiveKind
from engine_patch.pool.tiers import AdapterTiers
from engine_patch.proved import refuse_unproved
from engine_patch.readiness import in_use
from engine_patch.ref import AdapterRef, parse_ref
from engine_patch.requests import request_of
from engine_patch.rule import METHODS, is_prefill_only
from engine_patch.scheduler import acting_of
from engine_patch.status import ask_offline, require_live
from engine_patch.store.file import describe
from engine_patch.store.folder import check_name

KINDS_REMEMBERED = 8
"""Shapes of weights whose checks and index are remembered; a trainer has one."""

NONCE_BYTES = 28
"""With a counter of 8 hex digits, a digest is as long as those of files."""

OTHER_WAY = "sync through a server with a store (`preft serve --adapters STORE`) instead"


class LiveVersion(NamedTuple):
    """What a sync made."""

    digest: str
    """What the version is known by, in prefix-cache keys too; never used before."""
    seconds: float
    """From the call until the weights lie in their pages, without what was queued on the device before."""
    num_bytes: int
    """Of its pages."""


class LiveAdapter:
    """One adapter, of which one version is the present one.

    All is called in the thread that steps the engine.
    """

    def __init__(
        self,
        llm: Any,
        name: str,
        method: str,
        base: BaseFingerprint,
        *,
        in_flight: Literal["finish", "abort"] = "finish",
    ) -> None:
        """Find the engine's pool; nothing takes room in it before the first `sync`.

        Args:
            llm: `vllm.LLM`, made with VLLM_ENABLE_V1_MULTIPROCESSING=0, `enable_lora=True` and a `max_lora_rank` that is enough.
            name: of its requests.
            method: such as `lorap`.
            base: the model that it is trained on.
            in_flight: what a sync does with requests that use the adapter: they end on the version that they began with, or
                they are aborted.

        Raises:
            PreftError: an engine that cannot be reached, or does not keep the prompt rule; an unknown method; a bad name.
        """
        if method not in METHODS:
            raise PreftError(f"unknown adapter method {method!r}; known: {', '.join(sorted(METHODS))}")
        if in_flight not in ("finish", "abort"):
            raise PreftError(f"in_flight is {in_flight!r}; requests in flight 'finish' or 'abort'")
        self._name, self._method, self._base, self._in_flight = check_name(name), method, base, in_flight
        self._llm, self._core, self._tiers = llm, core_of(llm), tiers_of(llm)
        if is_prefill_only(method):
            refuse_unproved(llm.llm_engine.vllm_config)
        # A digest of the bytes would cost more than the copy, and would have to be taken on the host.
        self._nonce, self._count = secrets.token_hex(NONCE_BYTES), itertools.count(1)
        self._kinds: dict[tuple[Any, ...], LiveKind] = {}
        self._present: AdapterRef | None = None
        core = weakref.ref(self._core)  # the core owns the pools: no cycle may keep a model's memory
        self._tiers.live.in_use = lambda: in_use(found) if (found := core()) else ()

    @property
    def request(self) -> Any:
        """The `LoRARequest` of the present version; others ask for versions that were replaced.

        Raises:
            PreftError: there is none yet.
        """
        if self._present is None:
            raise PreftError(f"live adapter {self._name} has no weights yet: sync them before the first request")
        return request_of(self._name, self._present)

    def sync(self, pairs: Mapping[str, LowRankPair]) -> LiveVersion:
        """Make `pairs` the present version; from the next request on, answers come from them, and from no KV of earlier ones.

        Args:
            pairs: by module name, on any device and of any dtype that files have; `b` may be a transposed view. They are read
                before this returns, and not kept.

        Raises:
            PreftError: weights that are no adapter of the method, or that the engine cannot serve (see `Limits.check`); no room
                for one more version. The former version stays.
        """
        self._tiers.device.rest()  # what the trainer queued is no part of the time
        started = time.perf_counter()
        kind = self._kind(pairs)
        if self._in_flight == "abort":
            self._abort()
        former = self._present.digest if self._present else None
        ref = AdapterRef.of_live(self._name, self._method, self._next_digest())
        acting = {parse_digest(request) for request in acting_of(self._core.scheduler).requests.values()}
        self._tiers.live.put(ref.digest, kind, pairs, replaces=former, acting=acting)
        self._present = ref
        return LiveVersion(ref.digest, time.perf_counter() - started, kind.share.num_bytes)

    def close(self) -> None:
        """Give the pages back, once no request in the engine uses them."""
        if self._present is not None:
            self._tiers.live.retire(self._present.digest)
            self._present = None

    def _next_digest(self) -> str:
        return f"{self._nonce}{next(self._count):08x}"

    def _kind(self, pairs: Mapping[str, LowRankPair]) -> LiveKind:
        """The checks of `pairs`, which depend on shapes alone, are made once."""
        looks = tuple(
            (name, pair.scaling, *((t.shape, t.dtype, t.stride()) for t in pair.tensors.values()))
            for name, pair in pairs.items()
        )
        if looks not in self._kinds:
            header = describe(Adapter(self._method, self._base, pairs))
            kind = self._tiers.live.kind(header, f"live adapter {self._name}", pairs)
            if len(self._kinds) >= KINDS_REMEMBERED:
                self._kinds.clear()
            self._kinds[looks] = kind
        return self._kinds[looks]

    def _abort(self) -> None:
        """End the requests that use any version; the caller gets no answer to them."""
        requests = self._core.scheduler.requests
        mine = AdapterRef.of_live(self._name, self._method, "").path
        using = [
            id_
            for id_, request in requests.items()
            if request.lora_request and (ref := parse_ref(request.lora_request.lora_path)) and ref.path == mine
        ]
        if using:
            self._llm.llm_engine.abort_request(using, internal=True)


def parse_digest(request: Any) -> str:
    """The content that a request of the scheduler uses; empty for none."""
    ref = parse_ref(request.lora_request.lora_path) if request.lora_request else None
    return ref.digest if ref else ""


def core_of(llm: Any) -> Any:
    """vLLM's `EngineCore` of an `LLM` in this process.

    Raises:
        PreftError: it is in another process, has several workers, takes no adapters, or lacks the patch; a vLLM not tested.
    """
    contract.check(contract.LIVE_SYMBOLS)
    config = llm.llm_engine.vllm_config
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if config.parallel_config.world_size > 1:
        raise PreftError(f"weights from memory reach an engine of one worker, and this one has several; {OTHER_WAY}")
    if core is None or type(core.model_executor).__name__ != "UniProcExecutor":
        raise PreftError(
            "weights from memory reach an engine in this process alone, and this one has processes of its own;"
            f" set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it starts, or {OTHER_WAY}"
        )
    if config.lora_config is None:
        raise PreftError("this engine takes no adapters: start it with enable_lora=True")
    require_live(ask_offline(llm))
    return core


def tiers_of(llm: Any) -> AdapterTiers:
    """The pools of an engine of which `core_of` has an answer."""
    (tiers,) = llm.collective_rpc(lambda worker: worker.model_runner.lora_manager.preft)
    if not isinstance(tiers, AdapterTiers):
        raise PreftError("the engine's worker has no pool of adapters")
    return tiers
