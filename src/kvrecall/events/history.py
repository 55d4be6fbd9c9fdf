"""What a publisher of KV events can repeat: its last batches as they were, and of all before them
what they have left stored."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvrecall.events.contents import PLACE, Abouts, BlockContent
from kvrecall.events.wire import CLEARED, DEVICE_MEDIUM, REMOVED, STORED, Batch, Event, Hash, encode

if TYPE_CHECKING:
    import zmq

_PATIENCE_S = 2.0  # with readers that take replays slower than they are sent, at once
_PATIENCE_SHARE = 0.1  # of all time
_PAUSE_S = 0.001
_MOST_BLOCKS = 4_000_000  # of which older batches are remembered: some hundred MB
_IN_A_BATCH = 1024  # blocks

_END = (-1).to_bytes(8, "big", signed=True)
_Place = tuple[Any, ...]  # medium, locality, ownership, group


class EventHistory:
    """The batches of one publisher. A reader that takes all of ``since(0)`` knows what the
    publisher holds, however long ago it was stored. Thread-safe.

    A batch that is too old to be kept as it was is taken apart: its events change a table of the
    blocks that are stored, which is what ``since`` begins with. Memory is bounded: of more than
    four million blocks the table leaves some out.
    """

    def __init__(self, batches: int, nbytes: int | None = None) -> None:
        """Keeps so many batches as they were, of at most ``nbytes`` bytes."""
        self._most, self._most_bytes = batches, nbytes
        self._lock = threading.Lock()
        self._kept: deque[Batch] = deque()
        self._kept_bytes = 0
        self._held: dict[_Place, dict[Hash, BlockContent]] = {}
        self._count = 0
        self._abouts = Abouts()
        self._rank: Any = 0
        self._patience_s, self._patience_at = _PATIENCE_S, time.monotonic()

    def append(self, batch: Batch) -> None:
        """The next batch has been published."""
        with self._lock:
            self._kept.append(batch)
            self._kept_bytes += len(batch[1])
            while len(self._kept) > 1 and (
                len(self._kept) > self._most
                or (self._most_bytes is not None and self._kept_bytes > self._most_bytes)
            ):
                _, payload = self._kept.popleft()
                self._kept_bytes -= len(payload)
                self._apply(payload)

    def since(self, start: int) -> Iterator[Batch]:
        """What a reader needs that has all batches before ``start``: those from ``start`` on, in
        order and without a gap. If some are no longer kept, the first say that all was cleared, and
        what the batches that are gone have left stored; they have the numbers just before those
        that are kept."""
        with self._lock:
            kept = [one for one in self._kept if one[0] >= start]
            first = self._kept[0][0] if self._kept else 0
            payloads = self._base(first - start) if start < first else []
        yield from zip(range(first - len(payloads), first), payloads, strict=True)
        yield from kept

    def replay(self, socket: zmq.Socket[bytes], topic: bytes) -> None:
        """Answers a request that waits at a ROUTER socket: the reader's name, an empty frame, the
        first number (up to 8 bytes). A reader slower than the answer is waited for, because the
        socket would leave out what it has no room for, unnoticed: two seconds, and a tenth of all
        time with one replay after the other. After that, or once the reader is gone, it gets no
        more, and has to ask again."""
        import zmq

        now = time.monotonic()
        gained_s = (now - self._patience_at) * _PATIENCE_SHARE
        self._patience_s = min(_PATIENCE_S, self._patience_s + gained_s)
        self._patience_at = now
        socket.set(zmq.ROUTER_MANDATORY, 1)
        asked = socket.recv_multipart()
        if len(asked) != 3 or len(asked[2]) > 8:
            return
        batches = self.since(int.from_bytes(asked[2], "big"))
        told = ((topic, number.to_bytes(8, "big"), payload) for number, payload in batches)
        for frames in itertools.chain(told, [(b"", _END, b"")]):
            while True:
                try:
                    socket.send_multipart((asked[0], b"", *frames), zmq.NOBLOCK)
                    break
                except zmq.Again:
                    if self._patience_s <= 0:
                        return
                    began = time.monotonic()
                    time.sleep(_PAUSE_S)
                    self._patience_s -= time.monotonic() - began
                except zmq.ZMQError:  # no route: it is gone
                    return

    # -- the table --------------------------------------------------------------------------

    def _apply(self, payload: bytes) -> None:
        _, events, *rank = msgspec.msgpack.decode(payload)
        self._rank = rank[0] if rank else None
        for event in events:
            kind = event["type"]
            if kind == CLEARED:
                self._held.clear()
                self._abouts.clear()
                self._count = 0
            elif kind == STORED:
                self._stored(event)
            elif kind == REMOVED:
                held = self._held.get(_place_of(event), {})
                for block in event["block_hashes"]:
                    self._count -= held.pop(block, None) is not None

    def _stored(self, event: Mapping[str, Any]) -> None:
        held = self._held.setdefault(_place_of(event), {})
        for block, content in self._abouts.contents(event):
            known = held.get(block)
            if known is not None and (content.tokens or not known.tokens):
                self._count -= held.pop(block, None) is not None
                known = None
            if known is None and self._count < _MOST_BLOCKS:
                held[block] = content
                self._count += 1

    def _base(self, most: int) -> list[bytes]:
        """The table as at most so many batches, in which a block comes after its parent."""
        count = max(_IN_A_BATCH, -(-self._count // most))
        batches: list[bytes] = []
        events: list[Event] = [{"type": CLEARED}]
        room, locality = count, None

        def end() -> None:
            batches.append(encode(events, self._rank))
            events.clear()
            time.sleep(0)  # a turn for the engine's thread

        for event in self._stored_events(count):
            is_apart = event.get("locality") != locality  # some readers refuse such a batch
            if (is_apart or room < len(event["block_hashes"])) and len(batches) + 1 < most:
                end()
                room = count
            room, locality = room - len(event["block_hashes"]), event.get("locality")
            events.append(event)
        end()
        return batches

    def _stored_events(self, most: int) -> Iterator[Event]:
        """The table as events: the device's first, then those with a locality last. A block whose
        parent is in another place waits for it: some readers drop blocks without their parents."""
        places = sorted(self._held, key=lambda p: (p[1] or "", p[0] not in (None, DEVICE_MEDIUM)))
        late: list[Event] = []
        missing: set[Hash] = set()  # the blocks of those
        for number, place in enumerate(places):
            coming = [self._held[one] for one in places[number + 1 :]]
            past = [self._held[one] for one in places[: number + 1]]
            for event in _events_of(self._held[place], most):
                parent = event["parent_block_hash"]
                is_early = any(parent in one for one in coming)
                if parent in missing or (is_early and not any(parent in one for one in past)):
                    late.append(event)
                    missing.update(event["block_hashes"])
                else:
                    yield event
        while late:
            ready = [one for one in late if one["parent_block_hash"] not in missing] or late
            for event in ready:
                yield event
                missing.difference_update(event["block_hashes"])
            late = [one for one in late if one not in ready]


def _place_of(event: Mapping[str, Any]) -> _Place:
    return tuple(event.get(name) for name in PLACE)


def _events_of(held: Mapping[Hash, BlockContent], most: int) -> Iterator[Event]:
    """``BlockStored`` of all these blocks, parents first, of at most ``most`` blocks each."""
    run: list[tuple[Hash, BlockContent]] = []
    for block in _parents_first(held):
        one = held[block]
        if run:
            last, before = run[-1]
            goes_on = one.parent == last and one.about is before.about and len(run) < most
            if not goes_on or bool(one.tokens) != bool(before.tokens):
                yield _event_of(run)
                run = []
        run.append((block, one))
    if run:
        yield _event_of(run)


def _parents_first(held: Mapping[Hash, BlockContent]) -> Iterator[Hash]:
    done: set[Hash] = set()
    for block in held:
        above = []
        at: Hash | None = block
        while at is not None and at in held and at not in done:
            done.add(at)
            above.append(at)
            at = held[at].parent
        yield from reversed(above)


def _event_of(run: Sequence[tuple[Hash, BlockContent]]) -> Event:
    first = run[0][1]
    tokens = array("I")
    tokens.frombytes(b"".join(one.tokens for _, one in run))
    event: Event = {
        "type": STORED,
        "block_hashes": [block for block, _ in run],
        "parent_block_hash": first.parent,
        "token_ids": tokens.tolist(),
        **first.about,
    }
    if any(one.extra is not None for _, one in run):
        event["extra_keys"] = [one.extra for _, one in run]
    return event
