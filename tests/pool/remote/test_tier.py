"""The remote tier over a store that fails, hangs, lags, loses and damages what it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks import ManualClock
from support.stores import MemoryStore

from kvrecall.config import DiskConfig, RemoteConfig
from kvrecall.errors import ConfigError
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.remote import tier as tier_module
from kvrecall.pool.remote.backends import make_store
from kvrecall.pool.remote.tier import HEADER_BYTES, RemoteTier, name_of
from kvrecall.pool.tier import Get, Outcome, PutVerdict, Tier
from kvrecall.testing import chain, wait_until
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench, TierContract

MIB = 1 << 20


class TestRemoteTier(TierContract):
    def make(self, path: Path) -> Tier:
        return RemoteTier(MemoryStore(), RemoteConfig("memory"))


class TestCascade(TierContract):
    def make(self, path: Path) -> Tier:
        store = MemoryStore()
        store.delay_s = 0.02
        remote = RemoteTier(store, RemoteConfig("memory"))
        return Cascade(DiskTier(DiskConfig(path, 64 * MIB)), remote)


class Host:
    """A host's remote tier, with a bench to move blocks."""

    def __init__(
        self, store: MemoryStore, monotonic: Callable[[], float] = time.monotonic, **settings: Any
    ) -> None:
        config = RemoteConfig("memory", **{"call_deadline_s": 5.0, **settings})
        self.tier = RemoteTier(store, config, monotonic)
        self.tier.register(NAMESPACE, BLOCK_BYTES)
        self.bench = Bench(self.tier)

    def ask(self, keys: list) -> list[bool]:
        wait_until(lambda: self.tier.ask(keys))
        return [self.tier.contains(key) for key in keys]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.gate.set()


@pytest.fixture
def hosts(store: MemoryStore) -> Iterator[tuple[Host, Host]]:
    hosts = Host(store), Host(store)
    yield hosts
    store.gate.set()
    for host in hosts:
        host.tier.close()


@pytest.fixture
def host(hosts: tuple[Host, Host]) -> Host:
    return hosts[0]


@pytest.fixture
def other(hosts: tuple[Host, Host]) -> Host:
    return hosts[1]


def test_another_host_finds_and_gets_what_one_put(host: Host, other: Host) -> None:
    keys = chain(NAMESPACE, 20)
    host.bench.put(keys[:15])
    assert not any(other.tier.contains(key) for key in keys)
    assert not other.tier.ask(keys)
    assert other.ask(keys) == [True] * 15 + [False] * 5
    assert other.bench.get(keys[:15]) == [Outcome.LOADED] * 15
    assert other.bench.holds(keys[:15])


@pytest.mark.parametrize("cause", sorted(set(Cause) - {Cause.DROPPED, Cause.CORRUPT}))
def test_only_an_operator_removes_for_all_hosts(
    host: Host, store: MemoryStore, cause: Cause
) -> None:
    keys = chain(NAMESPACE, 4)
    host.bench.put(keys)
    host.tier.drop(keys[:3], cause)
    host.tier.drop(keys[3:])
    wait_until(lambda: name_of(keys[3]) not in store.values)
    assert set(store.values) == {name_of(key) for key in keys[:3]}


def test_a_thousand_questions_are_one_call(host: Host, store: MemoryStore) -> None:
    store.gate.clear()
    assert not any(host.tier.ask(chain(NAMESPACE, 1000)) for _ in range(50)), "it waited"
    store.gate.set()
    host.ask(chain(NAMESPACE, 1000))
    assert store.calls == [("exists", 1000)]
    host.ask(chain(NAMESPACE, 1000))
    assert store.calls == [("exists", 1000)], "the answers were forgotten at once"


def test_asks_for_each_key_that_is_not_known(host: Host, other: Host, store: MemoryStore) -> None:
    keys = chain(NAMESPACE, 12)
    host.bench.put(keys[::3])
    other.ask(keys[:4])
    store.calls.clear()
    store.gate.clear()
    assert not any(other.tier.ask(keys, every=True) for _ in range(20))
    assert other.tier.ask(keys), "the first is known"
    store.gate.set()
    wait_until(lambda: other.tier.ask(keys, every=True))
    assert [other.tier.contains(key) for key in keys] == [True, False, False] * 4
    assert store.calls == [("exists", 8)], "asked once, and not for what was known"


@pytest.mark.parametrize("spoil", ["byte", "header", "other"])
def test_a_value_that_is_not_the_block_is_a_miss_and_goes(
    host: Host, other: Host, store: MemoryStore, spoil: str
) -> None:
    keys = chain(NAMESPACE, 3)
    host.bench.put(keys)
    name = name_of(keys[1])
    value = store.values[name]
    store.values[name] = {
        "byte": value[:5000] + bytes([value[5000] ^ 1]) + value[5001:],
        "header": bytes(HEADER_BYTES) + value[HEADER_BYTES:],
        "other": store.values[name_of(keys[2])],
    }[spoil]
    assert other.ask(keys) == [True] * 3
    good, bad = Outcome.LOADED, Outcome.CORRUPT
    assert other.bench.get(keys) == [good, bad, good]
    assert other.tier.stats().corrupt == 1
    wait_until(lambda: name not in store.values)
    assert not other.tier.contains(keys[1])
    assert other.bench.put([keys[1]]) == [Outcome.STORED]
    assert other.bench.get(keys) == [good] * 3


@pytest.mark.parametrize("more", [-1, 1])
def test_a_value_of_a_wrong_size_is_a_miss_and_goes_when_it_stays_so(
    host: Host, store: MemoryStore, more: int
) -> None:
    """At first the host that holds it may only be out of reach."""
    keys = chain(NAMESPACE, 3)
    host.bench.put(keys)
    name = name_of(keys[1])
    store.values[name] = (store.values[name] + b"x")[: len(store.values[name]) + more]
    clock = ManualClock()
    late = Host(store, monotonic=clock)
    bench, tier = late.bench, late.tier
    for outcome in (Outcome.MISS, Outcome.MISS, Outcome.CORRUPT):
        wait_until(lambda: tier.ask(keys[1:]))
        assert bench.get(keys) == [Outcome.LOADED, outcome, Outcome.LOADED]
        clock.advance(40.0)
    wait_until(lambda: name not in store.values)
    assert bench.put([keys[1]]) == [Outcome.STORED]
    assert bench.get(keys) == [Outcome.LOADED] * 3
    tier.close()


def test_a_block_that_went_after_it_was_found_is_a_miss(
    host: Host, other: Host, store: MemoryStore
) -> None:
    keys = chain(NAMESPACE, 3)
    host.bench.put(keys)
    other.ask(keys)
    store.values.clear()
    assert other.bench.get(keys) == [Outcome.MISS] * 3
    assert not any(other.tier.contains(key) for key in keys)
    assert other.tier.stats().corrupt == 0


def test_a_store_that_fails_is_left_alone_and_rejoined(host: Host, store: MemoryStore) -> None:
    keys = chain(NAMESPACE, 6)
    host.bench.put(keys[:3])
    store.failing = OSError("connection refused")
    assert host.bench.get(keys[:3]) == [Outcome.MISS] * 3
    calls = len(store.calls)
    assert host.tier.ask(keys), "nothing to wait for while the store is away"
    assert not host.tier.contains(keys[0])
    assert host.bench.submit_put(keys[3:]) == [PutVerdict.SHED] * 3
    assert host.bench.get(keys[:3]) == [Outcome.MISS] * 3
    assert len(store.calls) == calls, "the store was not left alone"
    store.failing = None
    wait_until(lambda: not host.tier.ask(keys))
    assert host.ask(keys) == [True] * 3 + [False] * 3
    assert host.bench.get(keys[:3]) == [Outcome.LOADED] * 3
    store.failing = OSError("connection reset")
    host.bench.get(keys[:1])
    store.failing = None
    store.values.clear()  # it came back empty
    wait_until(lambda: not host.tier.ask(keys))
    assert host.ask(keys) == [False] * 6, "it was taken for granted"
    assert host.bench.put(keys) == [Outcome.STORED] * 6


def test_what_a_store_did_not_tell_about_is_not_known_after_its_pause_either(
    store: MemoryStore,
) -> None:
    clock = ManualClock()
    host, keys = Host(store, monotonic=clock), chain(NAMESPACE, 3)
    store.failing = OSError("no route to the store")
    host.tier.ask(keys[:2])
    wait_until(lambda: host.tier.is_silent(keys[0]))
    clock.advance(60.0)  # the next call is a trial
    assert [host.tier.is_silent(key) for key in keys] == [True, True, False]
    store.failing = None
    host.ask(keys)
    assert not any(map(host.tier.is_silent, keys))
    host.tier.close()


def test_a_store_that_hangs_costs_no_call_any_time(store: MemoryStore) -> None:
    clock = ManualClock()
    host = Host(store, monotonic=clock)
    keys = chain(NAMESPACE, 30)
    host.bench.put(keys[:10])
    store.gate.clear()
    host.bench.submit_get(keys[:1])
    wait_until(lambda: store.calls[-1][0] == "get")
    assert host.tier.contains(keys[0])
    clock.advance(5.1)
    assert not host.tier.contains(keys[0])
    assert host.tier.ask(keys)
    assert host.bench.submit_put(keys[20:], base=50) == [PutVerdict.SHED] * 10
    assert host.tier.poll() == []
    assert host.tier.queued() == (0, 1), "its memory is owed until the call returns"
    store.gate.set()
    assert host.bench.collect(keys[:1]) == [Outcome.LOADED]
    wait_until(lambda: host.tier.contains(keys[0]))
    host.tier.close()


def test_closing_does_not_wait_for_a_store_that_hangs(store: MemoryStore) -> None:
    host = Host(store, call_deadline_s=0.2)
    keys = chain(NAMESPACE, 5)
    store.gate.clear()
    host.bench.submit_put(keys)
    host.tier.close(deadline_s=0.3)
    assert host.bench.collect(keys) == [Outcome.SHED] * 5
    store.gate.set()


def test_the_queue_of_puts_is_bounded(store: MemoryStore) -> None:
    host = Host(store, max_queued_bytes=10 * BLOCK_BYTES)
    bench, tier = host.bench, host.tier
    store.gate.clear()
    verdicts = bench.submit_put(chain(NAMESPACE, 30))
    assert verdicts == [PutVerdict.QUEUED] * 10 + [PutVerdict.SHED] * 20
    store.gate.set()
    bench.collect(chain(NAMESPACE, 10))
    assert tier.stats().dropped == 20
    tier.close()


def test_a_slot_of_another_size_is_not_written(host: Host) -> None:
    key = chain(NAMESPACE, 1)
    host.bench.put(key)
    slot = host.bench.slot(1)
    for into in (slot[:4096], slot[: len(slot) - 4096], memoryview(bytearray(len(slot) + 4096))):
        host.tier.submit_get([Get(key[0], into)])
        assert host.bench.collect(key) == [Outcome.MISS]


def test_what_is_dropped_while_it_is_stored_goes(host: Host, store: MemoryStore) -> None:
    keys = chain(NAMESPACE, 3)
    store.gate.clear()
    host.bench.submit_put(keys)
    wait_until(lambda: sum(count for _, count in store.calls) == 3)
    host.tier.drop(keys[:1])
    store.gate.set()
    assert host.bench.collect(keys) == [Outcome.SHED, Outcome.STORED, Outcome.STORED]
    assert not host.tier.contains(keys[0])
    wait_until(lambda: set(store.values) == {name_of(key) for key in keys[1:]})


def test_a_put_that_returns_after_the_tier_was_closed_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, failures = MemoryStore(), []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    host, keys = Host(store), chain(NAMESPACE, 5)
    store.gate.clear()
    host.bench.submit_put(keys)
    host.tier.close(deadline_s=0.1)
    assert host.bench.collect(keys) == [Outcome.SHED] * 5
    store.gate.set()
    name = "kvrecall-remote-put"
    wait_until(lambda: not any(one.name.startswith(name) for one in threading.enumerate()))
    assert (failures, host.tier.poll()) == ([], [])


def test_answers_to_other_questions_are_none(host: Host, store: MemoryStore) -> None:
    keys = chain(NAMESPACE, 3)
    host.bench.put(keys)
    store.exists = lambda names: [True]  # type: ignore[method-assign]
    other = chain(NAMESPACE, 3, "other")
    assert host.ask(other) == [False] * 3
    assert host.tier.stats().errors == 1


def test_lookups_that_wait_are_bounded(
    host: Host, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond that blocks count as absent."""
    monkeypatch.setattr(tier_module, "_ASKS_WAITING", 4)
    store.gate.clear()
    keys = chain(NAMESPACE, 6)
    assert [host.tier.ask([key]) for key in keys] == [False] * 4 + [True] * 2
    store.gate.set()
    wait_until(lambda: all(host.tier.ask([key]) for key in keys[:4]))
    assert not host.tier.ask(keys[4:])


def test_a_reading_tier_stores_nothing(host: Host, store: MemoryStore) -> None:
    reader = Host(store, writes=False)
    bench, tier = reader.bench, reader.tier
    keys = chain(NAMESPACE, 4)
    assert bench.submit_put(keys) == [PutVerdict.SHED] * 4
    host.bench.put(keys)
    assert bench.get(keys) == [Outcome.LOADED] * 4
    tier.close()


def test_a_dropped_block_is_gone_for_all_a_cleared_tier_forgets_for_itself(
    host: Host, other: Host
) -> None:
    keys = chain(NAMESPACE, 4)
    host.bench.put(keys)
    host.tier.drop(keys[:1])
    host.tier.clear()
    assert not any(host.tier.contains(key) for key in keys)
    wait_until(lambda: name_of(keys[0]) not in other.tier._store.values)
    assert other.ask(keys[1:]) == [True] * 3


def test_latencies_are_kept(host: Host) -> None:
    keys = chain(NAMESPACE, 4)
    host.bench.put(keys)
    host.bench.get(keys)
    host.ask(chain(NAMESPACE, 9, "other"))
    told = {"remote_read_seconds": 4, "remote_write_seconds": 4, "remote_lookup_seconds": 1}
    for at in -1, -2:  # none took longer than the largest bound
        assert {name: rows[at][1] for name, rows in host.tier.histograms().items()} == told


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("mongoose", "allowed: mooncake, objects, or package.module:Factory"),
        ("no.such.module:Factory", "cannot import no.such.module"),
        ("support.stores:Missing", "has no Missing"),
        ("kvrecall.pool.remote.calls:CallQueue", "does not take these options"),
    ],
)
def test_a_kind_that_is_none_is_named(kind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_store(kind, {})
