"""Which instance gets a prompt, by what their events say that they hold."""

from __future__ import annotations

import random

import msgspec
import pytest
from events.test_holdings import MEDIA, Json, removed, stored
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import fuzz

from kvrecall.block import TierName
from kvrecall.events.holdings import HashRule, tier_of
from kvrecall.events.subscriber import (
    BatchOutcome,
    EventReader,
    Publisher,
    Subscription,
    Subscriptions,
)
from kvrecall.router.fleet import COST, Address, Fleet
from kvrecall.router.prefixes import Prompt

RULE = HashRule("sha256_cbor", 16)


def fleet(engines: int = 2, pool: bool = False) -> tuple[Fleet, list[EventReader]]:
    """Engines of which the events are applied by hand; the last reader is of their pool."""
    service = Publisher("n", 9000, 9001) if pool else None
    following = Subscriptions(lambda _: None)
    addresses = [
        Address(f"http://e{at}:1", (Publisher(f"e{at}", 5557, 5558),), service)
        for at in range(engines)
    ]
    made = Fleet((), (), 4, addresses, following, clock=lambda: 0.0)
    for instance in made.all:
        instance.healthy = True
        instance.engine[0].holdings.rule = RULE
    readers = [one.engine[0].reader for one in made.all]
    if pool:
        readers.append(made.all[0].pool[0].reader)
    return made, readers


def ask(tokens: int, seed: int = 0, salt: str | None = None) -> Prompt:
    ids = random.Random(seed).choices(range(1000), k=tokens)
    return Prompt(tokens, (), salt=salt).with_ids(ids)


def say(reader: EventReader, *said: Json) -> None:
    clock = reader.last_ts + 1.0
    batch = msgspec.msgpack.encode([clock, list(said), 0])
    assert reader.take(reader.last + 1, batch) is BatchOutcome.APPLIED


def test_the_nearer_tier_is_preferred_and_more_over_nearer() -> None:
    all_, (one, two) = fleet()
    prompt = ask(170)
    chain = list(prompt.chain(RULE) or ())
    assert len(chain) == 10
    say(one, stored("CPU", chain))
    say(two, stored("GPU", chain))
    first, second = all_.all
    assert all_.expected(first, prompt) == {TierName.HOST: 160}
    assert all_.best_for_decode(prompt) == [second, first]
    say(two, removed("GPU", chain[4:]))
    assert all_.expected(second, prompt) == {TierName.DEVICE: 64}
    assert all_.best_for_decode(prompt) == [first, second]
    say(one, removed("CPU", chain[:1]))
    assert all_.expected(first, prompt) == {}


@pytest.mark.parametrize("waits", [0, 100, 250, 330, 400, 580, 620, 1000])
@pytest.mark.parametrize("tier", list(MEDIA))
def test_a_hit_is_weighed_against_what_waits(tier: TierName, waits: int) -> None:
    """In tokens computed: a hit of 160 tokens saves them but for the cost of their tier; a token
    that waits costs a quarter."""
    all_, (one, _) = fleet()
    holder, idle = all_.all
    prompt = ask(170)
    say(one, stored(MEDIA[tier], list(prompt.chain(RULE) or ())))
    saved = 160 * (1 - COST[tier])
    holder.waiting = waits
    assert all_.best_for_decode(prompt)[0] is (holder if saved > waits / 4 else idle)


def test_other_salts_are_never_matched() -> None:
    all_, (one, _) = fleet()
    mine, other, none = ask(170, salt="a"), ask(170, salt="b"), ask(170)
    say(one, stored("GPU", list(mine.chain(RULE) or ())))
    assert all_.expected(all_.all[0], mine) == {TierName.DEVICE: 160}
    for prompt in (other, none):
        assert all_.expected(all_.all[0], prompt) == {}
        assert all_.new_tokens(prompt) == 170


def test_what_a_pool_service_holds_both_engines_recall() -> None:
    all_, (_, two, service) = fleet(pool=True)
    prompt = ask(170)
    chain = list(prompt.chain(RULE) or ())
    say(service, stored("CPU", chain))
    say(two, stored("GPU", chain[:2]))
    first, second = all_.all
    assert all_.expected(first, prompt) == {TierName.HOST: 160}
    assert all_.expected(second, prompt) == {TierName.DEVICE: 32, TierName.HOST: 128}
    assert all_.best_for_decode(prompt)[0] is second


def test_a_shared_store_is_known_to_all_that_use_it() -> None:
    all_, (one, two, three) = fleet(3)
    prompt = ask(170)
    chain = list(prompt.chain(RULE) or ())
    remote = {"locality": "REMOTE", "ownership": "store-1"}
    say(one, stored("STORAGE", chain) | remote)
    say(two, stored("STORAGE", [1]) | remote)
    say(three, stored("STORAGE", [2]) | remote | {"ownership": "store-2"})
    first, second, third = all_.all
    assert all_.expected(first, prompt) == all_.expected(second, prompt) == {TierName.REMOTE: 160}
    assert all_.expected(third, prompt) == {}


@fuzz(100)
@given(st.randoms(use_true_random=False))
def test_what_is_expected_is_what_each_block_says(draw: random.Random) -> None:
    """Of one that has not the first block, only what the store has counts."""
    all_, readers = fleet(3, pool=True)
    prompt = ask(170)
    wide = all_.all[2].engine[0].holdings.rule = HashRule("sha256_cbor", 32)
    chains = {rule: list(prompt.chain(rule) or ()) for rule in (RULE, wide)}
    stores = [{"locality": "REMOTE", "ownership": f"store-{number}"} for number in range(2)]
    for reader in readers:
        for _ in range(draw.randrange(4)):
            chain = chains[draw.choice([RULE, RULE, wide])]
            some = chain[draw.choice([0, 0, 1, 4]) : draw.choice([2, 6, 10])]
            medium = draw.choice(["GPU", "CPU", "STORAGE"])
            say(reader, stored(medium, some) | (draw.choice(stores) if medium == "STORAGE" else {}))
    if draw.random() < 0.5:
        all_.sent(all_.all[0], draw.choice([prompt, ask(90, seed=1)]))
    following = [one.holdings for one in all_._subscriptions.of.values()]
    shared = all_._shared()
    for instance in all_.all:
        own, size = instance.holdings, 32 if instance.rule == wide else 16
        chain = chains[wide if size == 32 else RULE]
        has_first = any(one.mask(chain[0]) for one in own)
        mine = {name for one in own for name in one.stores}
        others = [one for one in following if one.stores & mine]
        count = dict.fromkeys(TierName, 0)
        for block in chain:
            mask = 0
            for one in own if has_first else ():
                mask |= one.mask(block)
            if not mask and any(one.mask(block) & 8 for one in others):
                mask = 8
            if not mask:
                break
            count[tier_of(mask) or TierName.REMOTE] += size
        expected = {tier: tokens for tier, tokens in count.items() if tokens}
        assert all_.expected(instance, prompt) == expected
        assert all_.expected(instance, prompt, shared) == expected


def test_what_was_just_sent_is_expected_until_events_speak() -> None:
    now = [0.0]
    all_, (one, _) = fleet()
    all_._clock = lambda: now[0]
    prompt = ask(170)
    chain = list(prompt.chain(RULE) or ())
    instance = all_.all[0]
    all_.sent(instance, prompt)
    assert all_.expected(instance, prompt) == {TierName.DEVICE: 160}
    say(one, stored("CPU", chain))
    assert all_.expected(instance, prompt) == {TierName.DEVICE: 160}
    say(one, stored("GPU", chain), removed("GPU", chain))
    assert all_.expected(instance, prompt) == {TierName.HOST: 160}
    say(one, removed("CPU", chain))
    all_.sent(instance, prompt)
    now[0] = 31.0
    assert all_.expected(instance, prompt) == {}


def test_the_last_token_is_computed_whatever_is_held() -> None:
    assert [len(ask(tokens).chain(RULE) or ()) for tokens in (16, 17, 160, 161)] == [0, 1, 9, 10]


def test_an_engine_that_comes_back_is_asked_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another process."""
    doubted: list[Subscription] = []
    monkeypatch.setattr(Subscription, "doubt", lambda self: doubted.append(self))
    all_, _ = fleet()
    all_.probed(all_.all[0], True)
    assert doubted == [], "it was up"
    all_.lost(all_.all[0], "it is gone")
    all_.probed(all_.all[0], True)
    assert doubted == list(all_.all[0].engine)
