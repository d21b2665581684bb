"""Live adapters: a trainer's weights in the pool, there as long as they are needed, and no longer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_patch import live as live_module
from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.kernels.step import Place
from engine_patch.live import LiveAdapter
from engine_patch.pool.manager import limits_of
from engine_patch.pool.tiers import NOT_YET, AdapterTiers
from engine_patch.ref import AdapterRef, parse_ref
from engine_patch.store.layout import PAGE_BYTES
from tests.live import FakeEngine, make_live, present
from tests.unit import pools
from tests.unit.pools import BASE, on_device, random_adapter, tiers, write
from tests.unit.tiny_llama import assert_same

pytest.importorskip("vllm")

PAGES = 4
"""Of an adapter of rank 4 on all modules, in float32."""


def bring(found: AdapterTiers, *refs: AdapterRef, running: tuple[AdapterRef, ...] = ()) -> list[Place]:
    """Ask until all have arrived, then take them as a step, with those that run."""
    paths = [ref.encode() for ref in refs]
    while missing := found.want([ref.encode() for ref in running], paths, 0.01):
        assert not any(missing.values()), missing
    return found.activate([*paths, *(ref.encode() for ref in running)])


def holds(found: AdapterTiers, ref: AdapterRef, adapter: Adapter) -> None:
    """A step that uses `ref` computes with the weights of `adapter`."""
    (place,) = found.activate([ref.encode()])
    assert_same(adapter, Adapter(adapter.method, adapter.base, on_device(found, place)))


def used_pages(found: AdapterTiers) -> int:
    return found.count().device.used_bytes // PAGE_BYTES


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tiers with a live adapter, by the size of the device pool."""

    def make(device_pages: int, host_pages: int = 64, slots: int = 3, **options: Any) -> tuple[Any, LiveAdapter]:
        engine = FakeEngine(tiers(device_pages, host_pages, slots, options.pop("dtype", torch.float32)))
        return engine, make_live(engine, monkeypatch, options.pop("base", BASE), **options)

    return make


class TestWeights:
    @pytest.mark.parametrize("of_trainer", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("of_engine", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_equal_those_of_a_file_bit_for_bit(
        self, made: Any, tmp_path: Path, of_engine: torch.dtype, of_trainer: torch.dtype
    ) -> None:
        """A file of the trainer's dtype, as it is loaded, and one of the engine's dtype."""
        adapter = random_adapter(1, rank=5).to(str(of_trainer).removeprefix("torch."))
        engine, live = made(16 * PAGES, dtype=of_engine)
        made_by_trainer = {
            name: LowRankPair(torch.nn.Parameter(pair.a), pair.b.t().contiguous().t(), pair.scaling)
            for name, pair in adapter.pairs.items()
        }
        version = live.sync(made_by_trainer)
        cast = adapter.to(str(of_engine).removeprefix("torch."))
        refs = [present(live), write(tmp_path, "cast", cast), write(tmp_path, "a", adapter)]
        runs = []
        for ref, place in zip(refs, bring(engine.tiers, *refs), strict=True):
            pages = engine.tiers.device.arena.runs[ref.digest]
            assert pages.start == place.page
            size = PAGE_BYTES // of_engine.itemsize
            runs.append(engine.tiers.device.pool[pages.start * size : pages.stop * size].view(torch.uint8))
            assert_same(cast, Adapter("lorap", BASE, on_device(engine.tiers, place)))
        assert torch.equal(runs[0], runs[1])
        assert version.num_bytes == runs[0].numel()

    def test_are_the_new_ones_after_every_sync(self, made: Any) -> None:
        engine, live = made(2 * PAGES)
        for seed in range(5):
            adapter = random_adapter(seed)
            live.sync(adapter.pairs)
            holds(engine.tiers, present(live), adapter)
        assert used_pages(engine.tiers) == PAGES

    def test_may_change_their_shapes(self, made: Any) -> None:
        engine, live = made(8 * PAGES)
        for seed, rank in enumerate((4, 7, 4, 1)):
            adapter = random_adapter(seed, rank=rank)
            live.sync(adapter.pairs)
            holds(engine.tiers, present(live), adapter)

    def test_are_not_the_trainer_s_own_memory(self, made: Any) -> None:
        engine, live = made(2 * PAGES)
        adapter = random_adapter(1)
        kept = Adapter(
            adapter.method, adapter.base, {name: pair.map(torch.clone) for name, pair in adapter.pairs.items()}
        )
        live.sync(adapter.pairs)
        for pair in adapter.pairs.values():
            pair.a.zero_()
        holds(engine.tiers, present(live), kept)

    def test_are_written_while_the_device_rests(self, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU: nothing that is queued reads the pages before, and nothing is queued that reads them too early."""
        engine, live = made(PAGES)
        device, seen = engine.tiers.device, []
        live.sync(random_adapter(1).pairs)
        monkeypatch.setattr(device, "_copies", SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device_: seen.append(device.pool.clone()))
        before = device.pool.clone()
        live.sync(random_adapter(2).pairs)
        assert len(seen) >= 2
        assert torch.equal(seen[-2], before)
        assert torch.equal(seen[-1], device.pool)
        assert not torch.equal(before, device.pool)


class TestDigest:
    def test_is_never_used_twice_and_names_an_adapter(self, made: Any) -> None:
        """The same weights too: whoever asks for the version of a sync gets no KV of before."""
        engine, live = made(2 * PAGES)
        other = LiveAdapter(engine, "policy", "lorap", BASE)
        pairs, digests, ids = random_adapter(1).pairs, set(), set()
        for adapter in (live, other):
            for _ in range(20):
                version, request = adapter.sync(pairs), adapter.request
                ref = parse_ref(request.lora_path)
                assert ref is not None
                assert (ref.digest, ref.method, ref.live, request.lora_name) == (
                    version.digest,
                    "lorap",
                    True,
                    "policy",
                )
                assert len(version.digest) == 64
                int(version.digest, 16)
                digests.add(version.digest)
                ids.add(request.lora_int_id)
            adapter.close()
        assert len(digests) == len(ids) == 40

    def test_no_request_before_the_first_sync_or_after_the_end(self, made: Any) -> None:
        engine, live = made(2 * PAGES)
        with pytest.raises(PreftError, match="live adapter policy has no weights yet: sync them"):
            _ = live.request
        live.sync(random_adapter(1).pairs)
        live.close()
        with pytest.raises(PreftError, match="has no weights yet"):
            _ = live.request
        assert used_pages(engine.tiers) == 0

    def test_a_file_is_not_live(self, tmp_path: Path) -> None:
        assert not write(tmp_path, "live", random_adapter(1)).live


class TestStays:
    def test_under_the_pressure_of_files(self, made: Any, tmp_path: Path) -> None:
        """A pool of three; a dozen files come and go, of other sizes too, so that runs are moved."""
        engine, live = made(3 * PAGES + 1)
        adapter = random_adapter(99)
        files = [write(tmp_path, str(seed), random_adapter(seed, rank=(4, 8, 2)[seed % 3])) for seed in range(12)]
        bring(engine.tiers, files[0])  # the version lies behind it, and in the way of the others
        live.sync(adapter.pairs)
        for _ in range(2):
            for file in files:
                bring(engine.tiers, file)
                assert not engine.tiers.forget(present(live).digest)
                holds(engine.tiers, present(live), adapter)
        counted = engine.tiers.count()
        assert counted.device.evictions > 10
        assert counted.compactions > 0
        assert counted.load_failures == counted.step_waits == 0

    def test_a_step_that_was_not_announced_does_not_push_it_out(self, made: Any, tmp_path: Path) -> None:
        engine, live = made(2 * PAGES)
        adapter = random_adapter(1)
        live.sync(adapter.pairs)
        for seed in (2, 3):
            engine.tiers.activate([write(tmp_path, str(seed), random_adapter(seed)).encode()])
        holds(engine.tiers, present(live), adapter)

    def test_a_file_that_can_never_fit_beside_it_fails_alone(self, made: Any, tmp_path: Path) -> None:
        engine, live = made(2 * PAGES)
        live.sync(random_adapter(1).pairs)
        fits, large = write(tmp_path, "fits", random_adapter(2)), write(tmp_path, "large", random_adapter(3, rank=8))
        missing = {large.digest: NOT_YET}
        while missing == {large.digest: NOT_YET}:
            missing = engine.tiers.want([], [large.encode(), present(live).encode()], 0.01)
        assert "beside the live adapters serve.gpu_pool has 16384; raise it" in missing[large.digest]
        assert missing.keys() == {large.digest}
        bring(engine.tiers, fits)

    def test_what_the_next_step_uses_is_not_evicted_for_it(self, made: Any, tmp_path: Path) -> None:
        engine, live = made(2 * PAGES)
        runs, idle = random_adapter(1), random_adapter(2)
        refs = [write(tmp_path, "runs", runs), write(tmp_path, "idle", idle)]
        bring(engine.tiers, *refs)
        engine.add("r", SimpleNamespace(lora_path=refs[0].encode()), acts=True)
        live.sync(random_adapter(3).pairs)
        assert engine.tiers.device.adapters.keys() == {refs[0].digest, present(live).digest}
        engine.add("s", live.request, acts=True)
        with pytest.raises(PreftError, match="no room for one more version"):
            live.sync(random_adapter(4).pairs)


class TestFormerVersion:
    def test_stays_as_long_as_a_request_uses_it_and_not_longer(self, made: Any, tmp_path: Path) -> None:
        engine, live = made(3 * PAGES)
        first, second = random_adapter(1), random_adapter(2)
        live.sync(first.pairs)
        former = present(live)
        engine.add("decodes", live.request)  # holds no slot, but may be preempted
        live.sync(second.pairs)
        for seed in range(3, 7):
            bring(engine.tiers, write(tmp_path, str(seed), random_adapter(seed)))
            assert not engine.tiers.forget(former.digest)
            holds(engine.tiers, former, first)
            holds(engine.tiers, present(live), second)
        engine.end("decodes")
        engine.tiers.want([], [])
        assert former.digest not in engine.tiers.device.adapters
        holds(engine.tiers, present(live), second)
        bring(engine.tiers, write(tmp_path, "large", random_adapter(8, rank=8)))

    def test_a_preempted_request_comes_back_to_it_though_a_file_waits_for_its_room(
        self, made: Any, tmp_path: Path
    ) -> None:
        """With priorities the file may stand first in the queue; what it waits for must not wait for it."""
        engine, live = made(2 * PAGES)
        first = random_adapter(1)
        live.sync(first.pairs)
        former = present(live)
        engine.add("preempted", live.request)
        live.sync(random_adapter(2).pairs)
        file = write(tmp_path, "file", random_adapter(3))
        missing: dict[str, str] = {}
        while not engine.tiers.host.adapters or not engine.tiers.host.ready(file):
            missing = engine.tiers.want([], [file.encode(), former.encode()], 0.01)
        missing = engine.tiers.want([], [file.encode(), former.encode()])
        assert missing == {file.digest: NOT_YET}
        holds(engine.tiers, former, first)
        engine.end("preempted")
        assert engine.tiers.want([], [file.encode()]) == {}

    def test_gives_room_to_the_next_at_once_where_nobody_uses_it(self, made: Any) -> None:
        engine, live = made(PAGES)
        for seed in range(3):
            live.sync(random_adapter(seed).pairs)
            holds(engine.tiers, present(live), random_adapter(seed))

    def test_no_room_is_an_error_that_changes_nothing(self, made: Any) -> None:
        engine, live = made(2 * PAGES - 1)
        adapter = random_adapter(1)
        live.sync(adapter.pairs)
        kept = present(live)
        engine.add("r", live.request)
        with pytest.raises(
            PreftError,
            match=r"takes 16384 bytes, and serve.gpu_pool has 28672, of which requests in flight use 1 .*raise serve.gpu_pool or",
        ):
            live.sync(random_adapter(2).pairs)
        assert present(live) == kept
        holds(engine.tiers, kept, adapter)
        engine.end("r")
        live.sync(random_adapter(2).pairs)
        holds(engine.tiers, present(live), random_adapter(2))

    def test_its_requests_are_aborted_if_so_configured(self, made: Any, tmp_path: Path) -> None:
        engine, live = made(PAGES, in_flight="abort")
        live.sync(random_adapter(1).pairs)
        file = SimpleNamespace(lora_path=write(tmp_path, "f", random_adapter(9)).encode())
        for id_, adapter in {"a": live.request, "base": None, "file": file, "b": live.request}.items():
            engine.add(id_, adapter, acts=id_ == "a")
        live.sync(random_adapter(2).pairs)
        assert engine.requests.keys() == {"base", "file"}
        assert used_pages(engine.tiers) == PAGES

    def test_who_asks_for_it_afterwards_is_refused(self, made: Any) -> None:
        engine, live = made(2 * PAGES)
        live.sync(random_adapter(1).pairs)
        former = present(live)
        live.sync(random_adapter(2).pairs)
        gone = r"live:policy were replaced before this request came; take LiveAdapter.request"
        missing = engine.tiers.want([], [former.encode(), present(live).encode()])
        assert missing.keys() == {former.digest}
        with pytest.raises(PreftError, match=gone):
            raise PreftError(missing[former.digest])
        with pytest.raises(PreftError, match=gone):
            engine.tiers.activate([former.encode()])


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda pairs: {**pairs, "model.layers.7.mlp.down_proj": pairs["model.layers.0.mlp.down_proj"]},
                "live adapter policy adapts modules that this engine does not have: model.layers.7.mlp.down_proj",
            ),
            (lambda pairs: random_adapter(1, rank=65).pairs, "has rank 65, this server holds up to 64"),
            (
                lambda pairs: {"model.layers.0.mlp.down_proj": LowRankPair(torch.ones(2, 64), torch.ones(64, 2), 1.0)},
                "goes from 64 to 64 features there, from 96 to 64 here",
            ),
            (
                lambda pairs: {"model.layers.0.mlp.down_proj": LowRankPair(torch.ones(2, 96), torch.ones(3, 64), 1.0)},
                "expected \\[rank, in_features\\] and \\[out_features, rank\\]",
            ),
            (
                lambda pairs: {name: pair.map(torch.Tensor.double) for name, pair in pairs.items()},
                "save them all in one type of float32",
            ),
            (lambda pairs: random_adapter(1, rank=33).pairs, "bytes, and serve.gpu_pool has 32768; raise it"),
            (lambda pairs: {}, "the adapter holds no LoRA weights"),
        ],
        ids=["module", "rank", "sizes", "shapes", "dtype", "bytes", "none"],
    )
    def test_weights(self, made: Any, change: Any, message: str) -> None:
        """As files are; and what was there stays."""
        engine, live = made(2 * PAGES)
        adapter = random_adapter(1)
        live.sync(adapter.pairs)
        kept = present(live)
        with pytest.raises(PreftError, match=message):
            live.sync(change(adapter.pairs))
        assert present(live) == kept
        holds(engine.tiers, kept, adapter)

    def test_weights_that_came_to_another_shape_are_checked_again(self, made: Any) -> None:
        _, live = made(2 * PAGES)
        pairs = dict(random_adapter(1).pairs)
        live.sync(pairs)
        pairs["model.layers.0.mlp.down_proj"] = LowRankPair(torch.ones(4, 64), torch.ones(64, 4), 0.5)
        with pytest.raises(PreftError, match="does not fit this engine"):
            live.sync(pairs)

    def test_another_base_model(self, made: Any) -> None:
        _, live = made(2 * PAGES, base=BaseFingerprint(hidden_size=128))
        with pytest.raises(PreftError, match="live adapter policy belongs to another base model: hidden_size is 128"):
            live.sync(random_adapter(1).pairs)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"method": "lorax"}, "unknown adapter method 'lorax'; known: direft, direftp, lora"),
            ({"in_flight": "wait"}, "in_flight is 'wait'; requests in flight 'finish' or 'abort'"),
        ],
    )
    def test_arguments(self, made: Any, change: dict[str, str], message: str) -> None:
        with pytest.raises(PreftError, match=message):
            made(2 * PAGES, **change)

    def test_a_name_of_no_adapter(self, made: Any) -> None:
        engine, _ = made(PAGES)
        with pytest.raises(PreftError, match=r"adapter name '\.\./x' is not allowed"):
            LiveAdapter(engine, "../x", "lorap", BASE)

    @pytest.mark.parametrize(
        ("world_size", "client", "lora", "message"),
        [
            (2, SimpleNamespace(), True, "this one has several; sync through a server with a store"),
            (
                1,
                SimpleNamespace(),
                True,
                "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it starts, or sync through a server",
            ),
            (1, "other executor", True, "has processes of its own; set VLLM_ENABLE_V1_MULTIPROCESSING=0"),
            (1, "in process", False, "takes no adapters: start it with enable_lora=True"),
            (1, "in process", True, "does not answer whether the prefill-only rule is live"),
        ],
    )
    def test_engines(self, world_size: int, client: Any, lora: bool, message: str) -> None:
        if isinstance(client, str):
            executor = type("UniProcExecutor" if client == "in process" else "MultiprocExecutor", (), {})()
            client = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor))
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=world_size), lora_config=SimpleNamespace() if lora else None
        )
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, engine_core=client))
        with pytest.raises(PreftError, match=message):
            live_module.core_of(llm)


def test_the_default_pool_holds_the_present_version_and_one_in_flight() -> None:
    made = pools.layers()
    largest = pools.limits(made, 1, 1).largest_pages() * PAGE_BYTES
    assert limits_of(made, 64, 1, 4, {}).device_bytes >= 2 * largest
