"""What other routers make of our KV events: their rules, as their sources of 2026 have them.

``python -m kvrecall_lab.readers`` plays a pool's events to each of them in several orders.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvrecall import testing
from kvrecall.block import BlockKey, Namespace, TierName
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.events.history import EventHistory
from kvrecall.events.holdings import Holdings
from kvrecall.events.publisher import PoolEvents, batches_of
from kvrecall.events.subscriber import EventReader
from kvrecall.events.wire import STORED, short_hash
from kvrecall.pool.changes import Watcher
from kvrecall.pool.pool import Pool
from kvrecall.testing.pool_contract import BLOCK_BYTES, SLOT_BYTES, Engine

_FULL = ("full_attention", "mla_attention", "sink_full_attention")
Seen = dict[str, set[int]]
"""Blocks by medium."""


class LlmD:
    """llm-d-router ebab6879, ``pkg/kvevents/pool.go``: keys of tokens, to which engines' hashes
    are mapped, of all pods; stores are counted by place."""

    def __init__(self, refuses_locality: bool = False, needs_size: bool = False) -> None:
        """Of other revisions: 0854a27d's recovery drops a batch with any locality; one before
        tested the block size first."""
        self._refuses, self._needs_size = refuses_locality, needs_size
        self._kinds: dict[int, str] = {}
        self._mapped: set[int] = set()
        self._refs: Counter[tuple[str, int | None, int]] = Counter()

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        events = list(events)
        if self._refuses and any(event.get("locality") for event in events):
            return
        for event in events:
            group = event.get("group_idx")
            place = (event.get("medium") or "GPU").upper(), group
            if event["type"] == "AllBlocksCleared":
                self._refs.clear()
            elif event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    self._refs[*place, one] = max(0, self._refs[*place, one] - 1)
                    if not any(self._refs[m, g, b] for m, g, b in [*self._refs] if b == one):
                        self._mapped.discard(one)
            elif self._takes(event, group):
                if event["token_ids"]:
                    self._mapped.update(event["block_hashes"])
                known = [one for one in event["block_hashes"] if one in self._mapped]
                self._refs.update((*place, one) for one in known)

    def _takes(self, event: Mapping[str, Any], group: int | None) -> bool:
        tokens, size, hashes = event["token_ids"], event["block_size"], event["block_hashes"]
        if group is not None:
            kind = event.get("kv_cache_spec_kind")
            kind = self._kinds.setdefault(group, kind) if kind else self._kinds.get(group)
            if kind not in _FULL or (self._needs_size and size <= 0):
                return False
            if tokens and (size <= 0 or len(tokens) != size * len(hashes)):
                return False
        parent = event.get("parent_block_hash")
        return not parent or parent in self._mapped

    def seen(self) -> Seen:
        found: Seen = {}
        for (medium, _, block), count in self._refs.items():
            if count and block in self._mapped:
                found.setdefault(medium, set()).add(block)
        return found


class Dynamo:
    """ai-dynamo 1.6.1, ``lib/kv-router/src/zmq_wire``: each block needs its tokens, or is known
    from the device of the same worker; nothing of another locality."""

    def __init__(self) -> None:
        self._groups: dict[int, str] = {}
        self._held: Seen = {}

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._held.clear()
                continue
            group, kind = event.get("group_idx"), event.get("kv_cache_spec_kind")
            if kind and group is not None:
                self._groups[group] = kind
            if event.get("locality") not in (None, "LOCAL"):
                continue
            if group is not None and self._groups.get(group) not in _FULL:
                continue
            medium, hashes = event.get("medium") or "GPU", event["block_hashes"]
            held = self._held.setdefault(medium, set())
            if event["type"] == "BlockRemoved":
                held.difference_update(hashes)
            elif event["token_ids"] and event["block_size"]:
                held.update(hashes[: len(event["token_ids"]) // event["block_size"]])
            elif medium != "GPU":
                device = self._held.get("GPU", set())
                gap = next((n for n, one in enumerate(hashes) if one not in device), len(hashes))
                held.update(hashes[:gap])

    def seen(self) -> Seen:
        return {medium: held for medium, held in self._held.items() if held}


class VllmRouter:
    """vllm-router 0.1.17, ``src/kv_index``: a tree of tokens; every store needs them, and a store
    whose parent is unknown lies at the root, where no prompt finds it."""

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}
        self._held: Seen = {}

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._held.clear()
                continue
            held = self._held.setdefault(event.get("medium") or "GPU", set())
            hashes = event["block_hashes"]
            if event["type"] == "BlockRemoved":
                held.difference_update(hashes)
                continue
            parent, size = event.get("parent_block_hash"), event["block_size"]
            for one in hashes[: len(event["token_ids"]) // size if size else 0]:
                if parent is None or parent in self._parents:
                    self._parents.setdefault(one, parent)
                    held.add(one)
                parent = one

    def seen(self) -> Seen:
        return {medium: held for medium, held in self._held.items() if held}


class Ours:
    """kvrecall's own router."""

    def __init__(self) -> None:
        self._reader = EventReader(Holdings())

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._reader.take(self._reader.last + 1, msgspec.msgpack.encode([1.0, [*events], 0]))

    def seen(self) -> Seen:
        media = {"GPU": TierName.DEVICE, "CPU": TierName.HOST, "STORAGE": TierName.DISK}
        held = ((medium, self._reader.holdings.hashes(tier)) for medium, tier in media.items())
        return {medium: blocks for medium, blocks in held if blocks}


ROUTERS: Mapping[tuple[str, str], Callable[[], LlmD | Dynamo | VllmRouter | Ours]] = {
    ("llm-d", "ebab6879"): LlmD,
    ("llm-d", "0854a27d"): lambda: LlmD(refuses_locality=True),
    ("llm-d", "block size first"): lambda: LlmD(needs_size=True),
    ("dynamo", "1.6.1"): Dynamo,
    ("vllm-router", "0.1.17"): VllmRouter,
    ("ours", "this commit"): Ours,
}


class Node:
    """A pool of 68 blocks in the host and 300 on disk, its events, and an engine's device."""

    def __init__(self, folder: Path) -> None:
        self._config = PoolConfig(68 * SLOT_BYTES, DiskConfig(folder, 64 << 20), policy="lru")
        self._space = Namespace.of({"block_size": "16"})
        self._rng = random.Random(7)
        self.stream: list[list[dict[str, Any]]] = []
        self.device: set[int] = set()
        self.tokens: dict[BlockKey, list[int]] = {}
        self.opened()

    def opened(self) -> None:
        """The pool's owner starts, and publishes."""
        self.pool = Pool.open(self._config)
        self.pool.register(self._space, BLOCK_BYTES)
        self._events = PoolEvents(self.pool, lambda: {self._space.digest: 0})
        self.pool.sweep = self._sweep  # type: ignore[method-assign]

    def _sweep(self, watcher: Watcher) -> Iterator[None]:
        """As of a disk whose slots were used again: in any order."""
        blocks = [*self.pool.admin.blocks()]
        self._rng.shuffle(blocks)
        for number, one in enumerate(blocks):
            watcher.stored(one.tier, one.key, one.parent)
            if number % 100 == 99:
                yield

    def prompts(self) -> list[list[BlockKey]]:
        chains = [testing.chain(self._space, 30, f"{number}") for number in range(10)]
        for key in itertools.chain(*chains):
            self.tokens[key] = [self._rng.randrange(150_000) for _ in range(16)]
        return chains

    def compute(self, keys: Sequence[BlockKey]) -> None:
        """The device stores a chain."""
        hashes = [short_hash(key[16:]) for key in keys]
        event = {"type": STORED, "block_hashes": hashes, "parent_block_hash": None, "group_idx": 0}
        event |= {"token_ids": [one for key in keys for one in self.tokens[key]], "block_size": 16}
        event |= {"medium": "GPU", "kv_cache_spec_kind": "full_attention", "lora_name": None}
        self.device |= {*hashes}
        self.stream.append([event])
        self._events.contents.learn(msgspec.msgpack.encode([1.0, [event], 0]))

    def save(self, keys: Sequence[BlockKey]) -> None:
        Engine(self.pool).save(list(keys))
        assert self.pool.flush(keys, 30.0)

    def publish(self, repeat: bool = False) -> None:
        """Without what the device's events are, until nothing more comes."""
        while (batch := self._events.take(repeat)) or not self._events.is_complete:
            self.stream += batches_of(batch)
            repeat = False

    def held(self) -> Seen:
        media = {TierName.HOST: "CPU", TierName.DISK: "STORAGE"}
        found: Seen = {"CPU": set(), "STORAGE": set(), "GPU": self.device}
        for one in self.pool.admin.blocks():
            found[media[one.tier]].add(short_hash(one.key[16:]))
        return found


def device_first(node: Node) -> None:
    for keys in node.prompts():
        node.compute(keys)
        node.save(keys)
        node.publish()


def pool_first(node: Node) -> None:
    chains = node.prompts()
    for keys in chains:
        node.save(keys)
        node.publish()
    for keys in chains:
        node.compute(keys)
        node.publish()


def after_a_restart(node: Node) -> None:
    device_first(node)
    node.pool.close()
    node.stream.clear()
    node.device.clear()
    node.opened()
    node.publish()
    for start in range(0, 300, 30):
        node.compute([*node.tokens][start : start + 30])
        node.publish()


def device_cleared(node: Node) -> None:
    device_first(node)
    node.device.clear()
    node.stream.append([{"type": "AllBlocksCleared"}])
    node.publish(repeat=True)


def service_alone(node: Node) -> None:
    """A reader of the service's stream that takes none of an engine."""
    device_first(node)
    node.device.clear()
    node.stream = [batch for batch in node.stream if batch[0]["medium"] != "GPU"]


def late(node: Node) -> None:
    """A reader that gets what a replay has of batches that are long gone."""
    device_first(node)
    history = EventHistory(1)
    for number, batch in enumerate([*node.stream, []]):
        history.append((number, msgspec.msgpack.encode([1.0, batch, 0])))
    node.stream = [msgspec.msgpack.decode(payload)[1] for _, payload in history.since(0)]


def evicted_and_dropped(node: Node) -> None:
    device_first(node)
    node.publish()
    node.pool.drop([*node.tokens][:150])
    node.publish()


ORDERS: tuple[Callable[[Node], None], ...] = (
    device_first, pool_first, after_a_restart, device_cleared, service_alone, late,
    evicted_and_dropped,
)  # fmt: skip


def lines() -> Iterator[dict[str, object]]:
    """For each order and router: blocks seen, of those held not seen, and seen but not held."""
    for order in ORDERS:
        with tempfile.TemporaryDirectory() as folder:
            node = Node(Path(folder))
            order(node)
            held = {(medium, one) for medium, blocks in node.held().items() for one in blocks}
            node.pool.close()
        for (router, revision), make in ROUTERS.items():
            reader = make()
            for batch in node.stream:
                reader.take(batch)
            told = reader.seen()
            seen = {(medium, one) for medium, blocks in told.items() for one in blocks}
            host, disk = (len(told.get(medium, ())) for medium in ("CPU", "STORAGE"))
            yield {
                "order": order.__name__, "router": router, "revision": revision,
                "blocks_seen": {"host": host, "disk": disk},
                "lost": len(held - seen), "stale": len(seen - held),
            }  # fmt: skip


if __name__ == "__main__":
    for line in lines():
        print(msgspec.json.encode(line).decode())
