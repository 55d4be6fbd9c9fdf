"""What the router knows of a publisher after its events, whatever was lost; and vLLM's block
hashes, computed without vLLM."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.block import TierName
from kvrecall.events.history import EventHistory
from kvrecall.events.holdings import HashRule, Holdings, rule_of
from kvrecall.events.subscriber import BatchOutcome, EventReader
from kvrecall.events.wire import short_hash

MEDIA = {TierName.DEVICE: "GPU", TierName.HOST: "CPU", TierName.DISK: "STORAGE"}
Json = dict[str, object]


# -- a publisher, and what is lost of what it says ------------------------------------------


@dataclass
class Engine:
    """Publishes as vLLM does: numbered batches, of which it keeps the last few, and what those
    before them have left stored."""

    keeps: int
    clock: list[float]
    number: int = 0
    held: dict[str, set[int]] = field(default_factory=lambda: {m: set() for m in MEDIA.values()})

    def __post_init__(self) -> None:
        self.history = EventHistory(self.keeps)

    def publish(self, events: list[Json]) -> tuple[int, bytes]:
        for event in events:
            hashes = set(event.get("block_hashes", ()))  # type: ignore[call-overload]
            if event["type"] == "AllBlocksCleared":
                self.held = {medium: set() for medium in self.held}
            elif event["type"] == "BlockStored":
                self.held[str(event["medium"])] |= hashes
            else:
                self.held[str(event["medium"])] -= hashes
        self.clock[0] += 1.0
        batch = (self.number, msgspec.msgpack.encode([self.clock[0], events, 0]))
        self.number += 1
        self.history.append(batch)
        return batch

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        return list(self.history.since(start))


def stored(medium: str, hashes: list[int]) -> Json:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "lora_name": None,
        "medium": medium,
    }


def removed(medium: str, hashes: list[int]) -> Json:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def catch_up(reader: EventReader, engine: Engine, can_replay: bool) -> None:
    """As ``Subscription`` does, without sockets."""
    for start in (max(0, reader.last), 0):
        if not can_replay:
            return reader.stays_alone()
        replayed = engine.replay(start)
        if reader.is_followed_by(replayed[0] if replayed else None):
            for number, payload in replayed:
                reader.skip_to(number)
                reader.take(number, payload)
            return None
    return None


def follow(reader: EventReader, engine: Engine, batch: tuple[int, bytes], can_replay: bool) -> None:
    if reader.take(*batch) is BatchOutcome.GAP:
        catch_up(reader, engine, can_replay)
        reader.skip_to(batch[0])
        reader.take(*batch)


hashes = st.lists(st.integers(0, 12), min_size=1, max_size=4)
media = st.sampled_from(sorted(MEDIA.values()))
events = st.one_of(
    st.builds(stored, media, hashes),
    st.builds(removed, media, hashes),
    st.just({"type": "AllBlocksCleared"}),
)
steps = st.lists(
    st.tuples(
        st.lists(events, min_size=1, max_size=3),
        st.sampled_from(["arrives", "arrives", "is lost", "comes twice"]),
        st.sampled_from([False, False, False, False, True]),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 8), st.booleans())
@settings(max_examples=400, deadline=None)
def test_never_more_is_known_than_is_held(
    story: list[tuple[list[Json], str, bool]], keeps: int, can_replay: bool
) -> None:
    clock = [100.0]
    engine = Engine(keeps, clock)
    reader = EventReader(Holdings())
    lost = 0  # since the engine started
    is_connected = True
    for published, fate, starts_again in story:
        if starts_again:
            engine = Engine(keeps, clock)
            lost, is_connected = 0, False
        batch = engine.publish(published)
        if fate == "is lost":
            lost += 1
            continue
        if not is_connected:  # the first batch that comes is of a new connection
            is_connected = True
            catch_up(reader, engine, can_replay)
        follow(reader, engine, batch, can_replay)
        if fate == "comes twice":
            assert reader.take(*batch) is BatchOutcome.KNOWN
        for tier, medium in MEDIA.items():
            known = reader.holdings.hashes(tier)
            assert known <= engine.held[medium]
            assert reader.holdings.blocks(tier) == len(known)
            if not lost or can_replay:
                assert known == engine.held[medium]


def test_hashes_of_bytes_and_fields_of_other_versions() -> None:
    reader = EventReader(Holdings())
    long = bytes(range(32))
    events = [stored("CPU", [long]), removed("GPU", [5])]  # type: ignore[list-item]
    assert reader.take(0, msgspec.msgpack.encode([1.0, events])) is BatchOutcome.APPLIED
    assert reader.holdings.hashes(TierName.HOST) == {short_hash(long)}
    newer = stored("GPU", [7]) | {"session_id": "s", "field_of_next_year": [1]}
    assert reader.take(1, msgspec.msgpack.encode([2.0, [newer], 0, "more"])) is BatchOutcome.APPLIED
    assert reader.holdings.hashes(TierName.DEVICE) == {7}
    for bad in (b"", b"\xc1", b"x" * 50, msgspec.msgpack.encode([1, [{"type": "Other"}]])):
        assert reader.take(2, bad) is BatchOutcome.UNREADABLE
    odd = msgspec.msgpack.encode([3.0, [stored("TAPE", [9])], 0])
    assert reader.take(2, odd) is BatchOutcome.APPLIED
    assert reader.holdings.mask(9) == 0


def test_groups_of_windows_do_not_count() -> None:
    reader = EventReader(Holdings())
    window = stored("GPU", [1]) | {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    full = stored("GPU", [2]) | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    later = stored("CPU", [1]) | {"group_idx": 1}
    gone = removed("GPU", [2]) | {"group_idx": 1}
    reader.take(0, msgspec.msgpack.encode([1.0, [window, full, later, gone], 0]))
    assert reader.holdings.mask(1) == 0
    assert reader.holdings.hashes(TierName.DEVICE) == {2}


def test_what_a_stranger_says_is_bounded() -> None:
    holdings = Holdings()
    reader = EventReader(holdings)
    pack = msgspec.msgpack.encode
    nested = b"\x93\xcb" + bytes(8) + b"\x91" * 100_000
    times = (float("nan"), float("inf"))
    for bad in (nested, *(pack([ts, [stored("GPU", [1])], 0]) for ts in times)):
        assert reader.take(0, bad) is BatchOutcome.UNREADABLE
    rule = HashRule("sha256_cbor", 4)
    one = {"block_hashes": list(rule.chain([1] * 4)), "token_ids": [1] * 4, "block_size": 4}
    for fields in (
        {"block_size": 0},
        {"block_size": -1},
        {"block_size": 10**18},
        {"token_ids": [[[]], {}, "a", 1]},
        {"token_ids": [1] * (2 << 20)},
    ):
        odd = pack([1.0, [stored("GPU", []) | one | fields], 0])
        assert reader.take(reader.last + 1, odd) is BatchOutcome.APPLIED
        assert holdings.rule is None
        assert len(holdings) == 1
    assert reader.take(reader.last + 1, pack([1.0, [stored("GPU", []) | one], 0]))
    assert holdings.rule == rule
    names = [stored("CPU", [1]) | {"locality": "REMOTE", "ownership": f"{n}"} for n in range(2000)]
    groups = [
        stored("CPU", [1]) | {"group_idx": n, "kv_cache_spec_kind": "sliding_window"}
        for n in range(2000)
    ]
    assert reader.take(reader.last + 1, pack([1.0, names + groups, 0]))
    assert len(holdings.stores) == 1024
    reader.take(reader.last + 1, pack([1.0, [stored("CPU", [9]) | {"group_idx": 1999}], 0]))
    assert holdings.mask(9)  # of a group too many, nothing is known
    many = pack([1.0, [stored("CPU", list(range(100_000)))], 0])
    _, parts = reader.begin(reader.last + 1, many)
    assert len(list(parts)) > 20  # each a turn for others


# -- hashes ----------------------------------------------------------------------------------


def vllm_hashes(algorithm: str, tokens: list[int], size: int, salt: str | None) -> list[int]:
    """By vLLM's own functions."""
    from types import SimpleNamespace

    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils as vllm

    function = get_hash_fn_by_name(algorithm)
    vllm.init_none_hash(function)
    request = SimpleNamespace(
        lora_request=None, mm_features=[], cache_salt=salt, prompt_embeds=None
    )
    parent, made = None, []
    for start in range(0, len(tokens) - size + 1, size):
        extra, _ = vllm.generate_block_hash_extra_keys(request, start, start + size, 0)  # type: ignore[arg-type]
        parent = vllm.hash_block_tokens(function, parent, tokens[start : start + size], extra)
        made.append(short_hash(parent))
    return made


@pytest.mark.parametrize("salt", [None, "a tenant's salt"])
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256", "xxhash", "xxhash_cbor"])
def test_hashes_are_vllms(
    algorithm: str, salt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if algorithm.startswith("xxhash"):  # known to others if the seed is set
        monkeypatch.setenv("PYTHONHASHSEED", "7")
    tokens = random.Random(1).choices(range(200_000), k=2500)
    rule, theirs = HashRule(algorithm, 16), vllm_hashes(algorithm, tokens, 16, salt)
    for count in (100, 1024, 2500, 2500):  # what is kept of them, and what is not
        assert list(rule.chain(tokens[:count], salt)) == theirs[: count // 16]
    assert rule.chain([*tokens[:2000], 1 << 64], salt) == tuple(theirs[:64])


def test_a_rule_is_found_from_one_block() -> None:
    tokens = list(range(1000, 1040))
    for algorithm in ("sha256_cbor", "sha256"):
        first = HashRule(algorithm, 16).chain(tokens, "s")[0]
        assert rule_of(first, tokens, 16, "s") == HashRule(algorithm, 16)
        assert rule_of(first, tokens, 16, "t") is None
        assert rule_of(first + 1, tokens, 16, "s") is None


def test_what_was_sent_is_believed_for_a_while() -> None:
    known = Holdings()
    known.sent([1], 100.0)
    assert [known.mask(1, now) for now in (100.0, 129.0, 131.0)] == [1, 1, 0]
    known.forget_sent()
    assert known.mask(1, 100.0) == 0
