"""From files through host memory to the device: the right weights, in time, and never more than the pools hold."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.errors import PreftError
from engine_patch.kernels.step import Place
from engine_patch.pool import device, host, share
from engine_patch.pool.tiers import NOT_YET, AdapterTiers
from engine_patch.ref import AdapterRef
from tests.unit import pools
from tests.unit.pools import on_device, random_adapter, tiers, write
from tests.unit.tiny_llama import assert_same

PAGES = 4
"""Of an adapter of rank 4 on all modules, in float32."""


def bring(found: AdapterTiers, *refs: AdapterRef) -> list[Place]:
    """Ask until all have arrived, as the scheduler does, then take them as a step."""
    paths = [ref.encode() for ref in refs]
    deadline = time.monotonic() + 20
    while missing := found.want([], paths, 0.01):
        assert not any(missing.values()), missing
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)
    return found.activate(paths)


def same_weights(adapter: Adapter, found: AdapterTiers, place: Place) -> None:
    assert_same(adapter, Adapter(adapter.method, adapter.base, on_device(found, place)))


def test_the_size_that_the_tests_count_with(tmp_path: Path) -> None:
    found = tiers(2 * PAGES, 2 * PAGES)
    bring(found, write(tmp_path, "a", random_adapter(1)))
    assert found.count().device.used_bytes == PAGES * 4096


def test_an_adapter_reaches_its_slot_bit_for_bit(tmp_path: Path) -> None:
    one, few = random_adapter(1), random_adapter(2, rank=7, modules=("model.layers.1.mlp.down_proj",))
    found = tiers(4 * PAGES, 4 * PAGES)
    slots = bring(found, write(tmp_path, "one", one), write(tmp_path, "few", few))
    assert len({place.page for place in slots}) == len({place.kind for place in slots}) == 2
    same_weights(one, found, slots[0])
    same_weights(few, found, slots[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_cast_once_when_it_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    one = random_adapter(1)
    found = tiers(4 * PAGES, 4 * PAGES, dtype=dtype)
    (slot,) = bring(found, write(tmp_path, "one", one))
    same_weights(one.to(str(dtype).removeprefix("torch.")), found, slot)


def test_nobody_waits_for_a_file_before_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`want` comes back at once; the step finds the adapter there, and has waited for nothing."""
    gate = threading.Event()
    load = share.Sharer.load

    def slow(*arguments: object) -> None:
        gate.wait(10)
        load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(share.Sharer, "load", slow)
    found, ref = tiers(2 * PAGES, 2 * PAGES), write(tmp_path, "a", random_adapter(1))
    began = time.perf_counter()
    assert found.want([], [ref.encode()]) == {ref.digest: NOT_YET}
    assert found.want([], [ref.encode()], patience=0.05) == {ref.digest: NOT_YET}
    assert time.perf_counter() - began < 5
    gate.set()
    bring(found, ref)
    counted = found.count()
    assert (counted.step_waits, counted.host.misses, counted.device.misses) == (0, 1, 1)


def test_what_is_ready_goes_to_the_device_ahead_of_the_step(tmp_path: Path) -> None:
    found, ref = tiers(2 * PAGES, 2 * PAGES), write(tmp_path, "a", random_adapter(1))
    while found.want([], [ref.encode()], 0.01):
        pass
    assert ref.digest in found.device.adapters
    found.activate([ref.encode()])
    assert found.count().device.hits == 1


def test_a_step_that_was_not_announced_waits_and_says_so(tmp_path: Path) -> None:
    one = random_adapter(1)
    found = tiers(2 * PAGES, 2 * PAGES)
    (slot,) = found.activate([write(tmp_path, "a", one).encode()])
    same_weights(one, found, slot)
    assert found.count().step_waits == 1


def test_a_file_that_cannot_be_loaded_is_an_error_for_its_digest_alone_and_is_tried_again(tmp_path: Path) -> None:
    good, bad = write(tmp_path, "good", random_adapter(1)), write(tmp_path, "bad", random_adapter(2))
    whole = bad.path.read_bytes()
    bad.path.write_bytes(whole[:-100] + b"x" + whole[-99:])
    found = tiers(4 * PAGES, 4 * PAGES)
    missing: dict[str, str] = {}
    while not any(missing.values()):
        missing = found.want([], [good.encode(), bad.encode()], 0.01)
    assert "is damaged: its content has the digest" in missing[bad.digest]
    assert found.count().load_failures == 1
    bad.path.write_bytes(whole)
    bring(found, good, bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated or half-written"),
        (
            lambda path: write(path.parent, "x", random_adapter(9)),
            "was replaced while a request for its former content",
        ),
        (lambda path: path.write_bytes(b"something else"), "is not a .preft file"),
    ],
)
def test_files_that_are_not_what_was_asked_for(tmp_path: Path, change: object, message: str) -> None:
    found, ref = tiers(2 * PAGES, 2 * PAGES), write(tmp_path, "x", random_adapter(1))
    change(ref.path)  # type: ignore[operator]
    missing = {ref.digest: NOT_YET}
    while missing == {ref.digest: NOT_YET}:
        missing = found.want([], [ref.encode()], 0.01)
    assert message in missing[ref.digest]


def test_a_stock_adapter_is_refused_with_the_remedy() -> None:
    with pytest.raises(PreftError, match=r"is a stock adapter: convert it \(preft convert\)"):
        tiers(2 * PAGES, 2 * PAGES).activate(["/peft/adapter"])


def in_host_memory(
    folder: Path, num_adapters: int, device_pages: int, rank: int = 4
) -> tuple[AdapterTiers, list[AdapterRef]]:
    """Adapters of one rank, none of them on the device yet."""
    refs = [write(folder, f"a{i}", random_adapter(i, rank=rank)) for i in range(num_adapters)]
    found = tiers(device_pages, 2 * num_adapters * PAGES, slots=4)
    for ref in refs:
        found.load(ref)
    return found, refs


def test_a_step_leaves_half_of_the_pool_to_adapters_that_are_to_be_copied(tmp_path: Path) -> None:
    found, refs = in_host_memory(tmp_path, 6, device_pages=4 * PAGES)
    paths = [ref.encode() for ref in refs]
    assert found.want([], paths) == {ref.digest: NOT_YET for ref in refs[2:]}
    found.activate(paths[:2])
    assert all(ref.digest in found.device.adapters for ref in refs[:4]), "the next ones are not brought ahead"
    assert found.want([], paths[2:]) == {ref.digest: NOT_YET for ref in refs[4:]}
    found.activate(paths[2:4])
    assert found.want([], paths[4:]) == {}
    found.activate(paths[4:])
    assert found.count().device.misses == 6, "one was dropped before its step"


def test_a_step_takes_all_that_the_pool_holds_if_nothing_is_to_be_copied(tmp_path: Path) -> None:
    found, refs = in_host_memory(tmp_path, 4, device_pages=4 * PAGES)
    paths = [ref.encode() for ref in refs]
    assert found.want([], paths) == {ref.digest: NOT_YET for ref in refs[2:]}
    assert found.want([], paths) == {}, "all are on the device now"
    found.activate(paths)
    assert found.count().device.misses == 4


def test_a_step_leaves_no_more_than_is_to_be_copied_and_keeps_nobody_from_an_adapter_that_runs(tmp_path: Path) -> None:
    found, refs = in_host_memory(tmp_path, 5, device_pages=4 * PAGES)
    paths = [ref.encode() for ref in refs]
    found.want([], paths[:4])
    assert found.want([], paths[:4]) == {}
    assert found.want([], paths).keys() == {refs[3].digest, refs[4].digest}, "room for one is enough for the fifth"
    assert found.want(paths[2:3], [paths[4], *paths[:3]]).keys() == {refs[1].digest}


@pytest.mark.parametrize("pool", [1, 2, 3, 5])
def test_every_request_is_served_with_any_pool(tmp_path: Path, pool: int) -> None:
    found, refs = in_host_memory(tmp_path, 8, device_pages=pool * PAGES)
    waiting = [*refs, *refs]
    for _ in range(len(waiting)):
        missing = found.want([], [ref.encode() for ref in waiting])
        step = [ref for ref in dict.fromkeys(waiting) if ref.digest not in missing][:4]
        assert step[0] is waiting[0], "the first was passed"
        found.activate([ref.encode() for ref in step])
        waiting = [ref for ref in waiting if ref not in step]
        if not waiting:
            return
    raise AssertionError("it took more steps than requests")


def test_one_adapter_of_more_than_half_of_the_pool_runs(tmp_path: Path) -> None:
    found, (large, other) = in_host_memory(tmp_path, 2, device_pages=2 * PAGES + 2, rank=8)
    assert found.want([], [large.encode(), other.encode()]) == {other.digest: NOT_YET}
    found.activate([large.encode()])


def test_a_large_adapter_is_not_passed_by_small_ones_for_ever(tmp_path: Path) -> None:
    """Two small ones run on the device; the large one that waits does not fit beside them, and who comes after it waits too."""
    small = [write(tmp_path, f"s{i}", random_adapter(i)) for i in range(3)]
    large = write(tmp_path, "large", random_adapter(9, rank=8))
    found = tiers(2 * PAGES + 2, 8 * PAGES, slots=3)
    bring(found, *small[:2])
    running = [ref.encode() for ref in small[:2]]
    while not all(ref.digest in found.host.adapters and found.host.ready(ref) for ref in (large, small[2])):
        found.want(running, [large.encode(), small[2].encode()], 0.01)
    assert found.want(running, [large.encode(), small[2].encode()]) == {large.digest: NOT_YET, small[2].digest: NOT_YET}
    assert found.want(running[:1], [small[2].encode()]) == {}
    assert found.want([], [large.encode()]) == {}
    found.activate([large.encode()])


def test_a_large_adapter_is_not_kept_out_of_host_memory_by_small_ones(tmp_path: Path) -> None:
    """It waits first in the queue while small ones come and go behind it: every hole that one leaves, the next would take."""
    small = [write(tmp_path, f"s{i}", random_adapter(i)) for i in range(24)]
    large = write(tmp_path, "large", random_adapter(99, rank=16))
    found = tiers(8 * PAGES, 8 * PAGES, slots=1)
    queue = list(small)
    for _ in range(8):  # the pool is full of them before the large one comes
        bring(found, queue[0])
        queue.append(queue.pop(0))
    for _ in range(100):
        missing = found.want([], [ref.encode() for ref in (large, *queue[:10])], 0.005)
        if large.digest not in missing:
            break
        served = next((ref for ref in queue[:10] if ref.digest not in missing), None)
        if served:
            found.activate([served.encode()])
            queue.remove(served)
            queue.append(served)
    assert large.digest not in missing
    found.activate([large.encode()])


def test_whatever_goes_wrong_in_a_thread_is_that_adapters_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = write(tmp_path, "good", random_adapter(1)), write(tmp_path, "bad", random_adapter(2))
    for broken in (host.HostTier._inspect, host.HostTier._load):

        def fails(self: object, ref: AdapterRef, *more: object, broken: Any = broken) -> Any:
            return 1 / 0 if ref == bad else broken(self, ref, *more)

        with monkeypatch.context() as patched:
            patched.setattr(host.HostTier, broken.__name__, fails)
            found = tiers(4 * PAGES, 4 * PAGES)
            missing: dict[str, str] = {}
            while not any(missing.values()):
                missing = found.want([], [good.encode(), bad.encode()], 0.01)
            assert "bad.preft cannot be loaded: ZeroDivisionError" in missing[bad.digest]
            bring(found, good)


def test_bytes_that_are_being_copied_are_not_evicted(tmp_path: Path) -> None:
    """On a GPU the copy to the device reads them after `want` has come back."""

    class Copying:
        over = False

        def query(self) -> bool:
            return self.over

    found = tiers(PAGES, PAGES, slots=1)
    one, two = write(tmp_path, "one", random_adapter(1)), write(tmp_path, "two", random_adapter(2))
    bring(found, one)
    copying = found.host.adapters[one.digest].copied = Copying()  # type: ignore[assignment]
    for _ in range(5):
        assert found.want([], [two.encode()], 0.01) == {two.digest: NOT_YET}
        time.sleep(0.01)
    assert one.digest in found.host.adapters
    copying.over = True
    bring(found, two)


def test_running_adapters_stay_on_the_device(tmp_path: Path) -> None:
    refs = [write(tmp_path, f"a{i}", random_adapter(i)) for i in range(4)]
    found = tiers(2 * PAGES, 8 * PAGES)
    bring(found, refs[0])
    for other in refs[1:]:
        while found.want([refs[0].encode()], [other.encode()], 0.01):
            pass
        found.activate([other.encode()])
        assert refs[0].digest in found.device.adapters
    assert found.count().device.evictions == 2


def test_adapters_that_are_moved_keep_their_weights(tmp_path: Path) -> None:
    """Two that run stand apart; the third fits into the two holes only when they are one."""
    made = {name: random_adapter(seed) for seed, name in enumerate("abcd")}
    refs = {name: write(tmp_path, name, adapter) for name, adapter in made.items()}
    large = random_adapter(9, rank=8)
    refs["large"] = write(tmp_path, "large", large)
    found = tiers(5 * PAGES, 9 * PAGES, slots=5)
    for name in "abcd":
        bring(found, refs[name])
    running = [refs[name].encode() for name in "bd"]
    while found.want(running, [refs["large"].encode()], 0.01):
        pass
    slots = found.activate([*running, refs["large"].encode()])
    assert found.count().compactions == 1
    for place, adapter in zip(slots, (made["b"], made["d"], large), strict=True):
        same_weights(adapter, found, place)


def test_a_resident_adapter_costs_nothing(tmp_path: Path) -> None:
    found, ref = tiers(2 * PAGES, 2 * PAGES), write(tmp_path, "a", random_adapter(1))
    places = bring(found, ref)
    before = found.count().model_dump()
    ref.path.unlink()
    assert bring(found, ref) == places
    after = found.count().model_dump()
    assert after["device"].pop("hits") == before["device"].pop("hits") + 1
    assert after == before


def test_ten_thousand_kinds_of_adapters_are_not_all_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own scaling, as after a sweep; what is known of a kind takes memory on the device too."""
    monkeypatch.setattr(share, "KINDS_REMEMBERED", 4)
    monkeypatch.setattr(host, "REMEMBERED", 4)
    monkeypatch.setattr(device, "KINDS_REMEMBERED", 4)
    found = tiers(2 * PAGES, 2 * PAGES)
    for seed in range(12):
        made = random_adapter(seed)
        made = Adapter("lorap", made.base, {n: LowRankPair(p.a, p.b, 1.0 + seed) for n, p in made.pairs.items()})
        (slot,) = bring(found, write(tmp_path, str(seed), made))
        same_weights(made, found, slot)
        assert max(len(found.device._kinds), len(found.host._shares), len(found.host._sharer._made)) <= 4


def test_warming_up_reads_zeros_that_are_there(tmp_path: Path) -> None:
    found = tiers(1, 1)
    found.warm_up(8)
    rows = found.device.table.view(-1, 4)
    assert rows[:, 2].unique().tolist() == [8]
    assert int(rows[0, 2]) * 96 <= found.device.pool.numel()
    found.device.clear_table()
    assert not found.device.table.any()


class TestKinds:
    """Each scaling makes a kind; the table has room for two."""

    @pytest.fixture
    def found(self, monkeypatch: pytest.MonkeyPatch) -> AdapterTiers:
        monkeypatch.setattr(device, "KINDS_REMEMBERED", 1)
        return tiers(4 * PAGES, 4 * PAGES, slots=2)

    @pytest.fixture
    def made(self, tmp_path: Path) -> dict[str, tuple[Adapter, AdapterRef]]:
        found = {}
        for number, name in enumerate("abc"):
            one = random_adapter(number)
            one = Adapter("lorap", one.base, {n: LowRankPair(p.a, p.b, 1.0 + number) for n, p in one.pairs.items()})
            found[name] = one, write(tmp_path, name, one)
        return found

    def bring(self, found: AdapterTiers, made: dict[str, tuple[Adapter, AdapterRef]], names: str) -> None:
        places = bring(found, *(made[name][1] for name in names))
        for place, name in zip(places, names, strict=True):
            same_weights(made[name][0], found, place)

    def test_a_new_one_takes_no_row_that_the_step_uses(self, found: Any, made: Any) -> None:
        for names in ("ab", "ca", "cb", "ba", "bc", "ab"):
            self.bring(found, made, names)

    def test_a_row_is_written_once_while_there_is_room(self, found: Any, made: Any) -> None:
        for names in ("a", "b", "a", "c"):
            self.bring(found, made, names)
        kept = bring(found, made["a"][1])
        found.device.table[kept[0].kind] = 7  # b went, as the one used longest ago
        assert bring(found, made["a"][1]) == kept
        assert found.device.table[kept[0].kind].unique().tolist() == [7]

    def test_all_are_forgotten_with_the_table(self, found: Any, made: Any) -> None:
        self.bring(found, made, "a")
        found.device.clear_table()
        self.bring(found, made, "a")


def test_two_hundred_random_steps_hold_the_right_weights(tmp_path: Path) -> None:
    rng = random.Random(0)
    made = [random_adapter(seed, rank=rng.choice((1, 4, 8, 12))) for seed in range(12)]
    refs = [write(tmp_path, str(seed), adapter) for seed, adapter in enumerate(made)]
    found = tiers(5 * PAGES, 6 * PAGES, slots=3)
    for _ in range(200):
        wanted = rng.sample(range(12), 3)
        arrived: list[int] = []
        while not arrived:
            missing = found.want([], [refs[i].encode() for i in wanted], 0.01)
            arrived = [i for i in wanted if refs[i].digest not in missing]
        for slot, index in zip(found.activate([refs[i].encode() for i in arrived]), arrived, strict=True):
            same_weights(made[index], found, slot)
        counted = found.count()
        assert counted.device.used_bytes <= counted.device.capacity_bytes == 5 * PAGES * 4096
        assert counted.host.used_bytes <= counted.host.capacity_bytes == 6 * PAGES * 4096
    assert counted.device.evictions > 50
    assert pools.SHAPES.keys() == found.limits.modules.keys()
