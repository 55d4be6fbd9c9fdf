"""The prefixes that the router remembers, and the instances it chooses."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import fuzz

from kvrecall.errors import ConfigError
from kvrecall.events.subscriber import Publisher
from kvrecall.router.addresses import address
from kvrecall.router.bodies import Body
from kvrecall.router.fleet import Address, Fleet
from kvrecall.router.prefixes import CHUNK_BYTES, PrefixMap, Prompt, is_text, prompt_of
from kvrecall.router.router import Completion, prompt_only

TEXT = "".join(f"line {number} of a text that repeats nothing. " for number in range(200))


def body(**fields: object) -> Body:
    return Body.read(json.dumps(fields).encode())


def prompt(text: str, **more: object) -> Prompt:
    made = prompt_of(body(prompt=text, **more))
    assert made is not None
    return made


def fleet(imbalance: int = 4) -> Fleet:
    decode = [Address(f"http://d{number}:1") for number in range(3)]
    made = Fleet([Address("http://p:1")], decode, imbalance)
    for instance in made.all:
        instance.healthy = True
    return made


def test_prefixes_are_those_of_the_text() -> None:
    whole, begun = prompt(TEXT), prompt(TEXT[: 5 * CHUNK_BYTES + 7])
    assert len(begun.prefixes) == 5
    assert whole.prefixes[:5] == begun.prefixes
    assert prompt("x" + TEXT).prefixes[0] != whole.prefixes[0]
    late = prompt(TEXT[:300] + "!" + TEXT[301:])
    assert late.prefixes[0] == whole.prefixes[0]
    assert late.prefixes[1:] != whole.prefixes[1:]


def test_tenants_and_models_share_nothing() -> None:
    plain = prompt(TEXT)
    for other in ({"cache_salt": "a"}, {"model": "m"}):
        assert not set(prompt(TEXT, **other).prefixes) & set(plain.prefixes)


def test_forms_of_prompts() -> None:
    assert prompt_of(body(prompt=[1, 2, 3])) == prompt_of(body(prompt=[[1, 2, 3]]))
    assert prompt_of(body(prompt=["abc"])) == prompt_of(body(prompt="abc"))
    assert prompt_of(body(prompt=list(range(1000)))).tokens == 1000  # type: ignore[union-attr]
    for several in (["a", "b"], [[1], [2]], [], None, 5, [1, "a"], [True], [[[]]], {"a": 1}):
        assert prompt_of(body(prompt=several)) is None
    for salt in (5, ["a"]):
        assert prompt_of(body(prompt="abc", cache_salt=salt)) is None
    talk = [{"role": "user", "content": TEXT}]
    more = [*talk, {"role": "assistant", "content": "Yes."}]
    first, second = prompt_of(body(messages=talk)), prompt_of(body(messages=more))
    assert first is not None
    assert second is not None
    assert second.prefixes[: len(first.prefixes)] == first.prefixes


def test_the_instance_that_holds_most_is_chosen_unless_it_is_much_busier() -> None:
    all_ = fleet(imbalance=2)
    first, second, third = all_.decode
    all_.computed(second, prompt(TEXT[: 4 * CHUNK_BYTES]))
    all_.computed(third, prompt(TEXT))
    assert all_.prefixes.held(prompt(TEXT)) == {
        second.bit: 4,
        third.bit: len(prompt(TEXT).prefixes),
    }
    assert all_.best_for_decode(prompt(TEXT)) == [third, second, first, all_.prefill[0]]
    third.inflight = 2
    assert all_.best_for_decode(prompt(TEXT))[0] is third
    third.inflight = 3
    assert all_.best_for_decode(prompt(TEXT))[:3] == [second, first, third]
    second.healthy = False
    assert second not in all_.best_for_decode(prompt(TEXT))


def test_a_request_goes_to_the_engines_of_its_model() -> None:
    all_ = fleet()
    first, second, third = all_.decode
    first.serves = second.serves = frozenset(("base", "adapter"))
    third.serves = frozenset(("other",))
    all_.computed(third, prompt(TEXT))
    assert set(all_.best_for_decode(prompt(TEXT), "base")[:-1]) == {first, second}
    assert all_.best_for_decode(prompt(TEXT), "other")[0] is third
    assert all_.least_busy("other") is third
    for unknown in ("new adapter", None, 5):
        assert all_.best_for_decode(prompt(TEXT), unknown)[0] is third
    assert all_.new_tokens(prompt(TEXT), "other") < all_.new_tokens(prompt(TEXT), "base")


def test_instances_join_and_leave() -> None:
    all_ = fleet()
    first, second, third = all_.decode
    all_.computed(second, prompt(TEXT))
    second.inflight += 1
    new = Address("http://new:1")
    all_.consist_of((), [first.address, new], ())
    assert all_.decode[0] is first
    assert all_.leaving == [second]
    assert second.leaves
    assert third.leaves
    joined = all_.decode[1]
    assert not joined.healthy
    assert joined.bit not in (first.bit, second.bit)
    assert all_.best_for_decode(prompt(TEXT)) == [first]
    all_.computed(second, prompt(TEXT))
    assert not all_.prefixes.held(prompt(TEXT)).keys() & {one.bit for one in all_.all}
    second.less_busy()
    assert not all_.leaving
    all_.consist_of((), [first.address, new, second.address], ())
    assert all_.decode[:2] == (first, joined)
    assert all_.decode[2] is not second
    assert len({one.bit for one in all_.all}) == 3


def test_instances_that_come_and_go_never_have_one_bit() -> None:
    all_ = fleet()
    first, second, third = (one.address for one in all_.decode)
    for _ in range(300):
        leaves = all_.decode[-1]
        all_.consist_of((), [first, second], ())
        all_.lost(leaves, "it stops after the file has changed")
        all_.consist_of((), [first, second, third], ())
        all_.decode[-1].healthy = True
    all_.consist_of((), [Address(f"http://d{number}:1") for number in range(400)], ())
    assert len({one.bit for one in all_.all}) == 400
    assert max(one.bit for one in all_.all) < 1 << 700


def test_an_instance_that_is_up_is_up_in_another_role() -> None:
    """And with other publishers: a file that says so of all of them leaves none without one."""
    all_ = fleet()
    first, second, third = all_.decode
    first.serves = first.models = frozenset({"base"})
    third.healthy = False
    told = dataclasses.replace(second.address, events=(Publisher("e", 5557, 5558),))
    all_.consist_of([first.address, third.address], [told, Address("http://new:1")], ())
    assert [one.healthy for one in all_.all] == [True, False, True, False]
    assert all_.prefill[0] is not first
    assert (all_.prefill[0].serves, all_.prefill[0].models) == (first.serves, first.models)


def test_equals_take_turns() -> None:
    all_ = fleet()
    assert {all_.best_for_prefill(None)[0].name} == {"p:1"}
    firsts = {all_.best_for_decode(None)[0].name for _ in range(3)}
    assert len(firsts) == 3


def test_new_prompts_are_spread_alike_by_every_router() -> None:
    chosen = Counter[str]()
    for number in range(600):
        asked, first, second = prompt(f"{number} {TEXT}"), fleet(), fleet()
        second.best_for_decode(None)  # whose turns are others
        one = first.best_for_decode(asked)[0].name
        assert second.best_for_decode(asked)[0].name == one
        chosen[one] += 1
    assert min(chosen.values()) > 150, chosen
    assert len(chosen) == 3


def test_new_tokens() -> None:
    all_ = fleet()
    asked = prompt_of(body(prompt=list(range(10_000, 12_000))))
    assert asked is not None
    assert all_.new_tokens(asked) == 2000
    all_.computed(all_.prefill[0], asked)
    assert all_.new_tokens(asked) == 0
    all_.lost(all_.prefill[0], "gone")
    assert all_.new_tokens(asked) == 2000


def test_an_instance_is_down_after_two_failed_probes() -> None:
    all_ = fleet()
    one = all_.decode[0]
    for well, healthy in ((False, True), (True, True), (False, True), (False, False), (True, True)):
        all_.probed(one, well)
        assert one.healthy is healthy


def test_an_instance_that_may_be_about_to_be_down_is_asked_last() -> None:
    """For tokens: an answer that does not come costs each request seconds."""
    all_ = fleet()
    for one in all_.all[1:]:
        one.inflight = 1
    assert all_.least_busy() is all_.all[0]
    all_.probed(all_.all[0], False)
    assert all_.least_busy() is all_.all[1]


def test_the_map_is_bounded_and_keeps_heads_longest() -> None:
    prefixes = PrefixMap(remembered=10)
    long = prompt(TEXT)
    assert prefixes.held(long) == {}
    prefixes.note(long, 1)
    assert len(prefixes) == 10
    assert prefixes.held(long) == {1: 10}


@fuzz(100)
@given(st.randoms(use_true_random=False))
def test_who_left_holds_nothing_and_its_bit_is_used_again(draw: random.Random) -> None:
    """To clear 200,000 entries whenever an instance goes down took .2 s each time."""
    prefixes = PrefixMap(12, most_gone=5)
    holders = [prefixes.holder() for _ in range(3)]
    known: dict[int, set[int]] = {}  # in their order of use
    left = 0
    for _ in range(200):
        chain = [10 * draw.randrange(9) + place for place in range(draw.randrange(1, 4))]
        asked = Prompt(0, tuple(chain), most_tokens=1)
        place = draw.randrange(3)
        if draw.random() < 0.2:
            prefixes.forget(holders[place])
            left += 1
            known = {one: some - {holders[place]} for one, some in known.items()}
            if left % 5 == 0:
                known = {one: some for one, some in known.items() if some}
                assert len(prefixes) == len(known)
            holders[place] = prefixes.holder()
        else:
            prefixes.note(asked, holders[place])
            for one in reversed(chain):
                known[one] = known.pop(one, set()) | {holders[place]}
            for one in list(known)[:-12]:
                del known[one]
        for holder in holders:
            has = [holder in known.get(one, ()) for one in chain]
            assert prefixes.held(asked).get(holder, 0) == [*has, False].index(False)
    assert max(holders) <= 1 << 3 + 5


def test_a_prompt_for_a_prefill_instance() -> None:
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "cache_salt": "s",
        "tools": [{"type": "function"}],
        "tool_choice": "required",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "max_completion_tokens": 50,
        "n": 3,
        "stop": ["a"],
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert json.loads(prompt_only(body(**asked)).encoded()) == {
        "model": "m",
        "messages": asked["messages"],
        "cache_salt": "s",
        "tools": asked["tools"],
        "tool_choice": "none",
        "chat_template_kwargs": asked["chat_template_kwargs"],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "temperature": 0.0,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


def test_usage_over_both_instances() -> None:
    split = {"device": 128, "host": 0, "computed": 72}
    request = Completion("/v1/completions", body(), {}, None, 0, print, prefill_split=split)
    event = b'data: {"choices":[],"usage":{"prompt_tokens":200,"prompt_tokens_details":'
    event += b'{"cached_tokens":128,"recall":{"host":128,"computed":72}}}}\n\n'
    told = json.loads(request.complete_event(event)[6:])["usage"]["prompt_tokens_details"]
    assert told == {
        "cached_tokens": 128,
        "recall": {"host": 128, "computed": 72},
        "prefill": {"device": 128, "host": 0, "computed": 72},
    }
    for other in (b"data: [DONE]\n\n", b': x\n\ndata: "usage":{ \n\n', b'data: {"usage":{\n\n'):
        assert request.complete_event(other) == other


@pytest.mark.parametrize(
    ("fields", "is_so"),
    [
        ({"prompt": "x"}, True),
        ({"prompt": "x", "messages": 5}, True),
        ({"messages": [{"content": [{"type": "text"}]}, {"content": "x"}, {"role": "a"}]}, True),
        ({"messages": [{"content": 5}]}, False),
        ({"messages": [5]}, False),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, False),
        ({"messages": [{"content": [{"type": ["text"]}]}]}, False),
        ({"messages": [{"content": [{"type": {"a": 1}}, 5]}]}, False),
        ({"prompt": "x", "prompt_embeds": ""}, False),
    ],
)
def test_what_is_text_of_any_form(fields: dict[str, object], is_so: bool) -> None:
    assert is_text(body(**fields)) is is_so


def test_what_waits_at_an_instance_counts_as_work() -> None:
    all_ = fleet()
    first, second, third = all_.decode
    all_.computed(first, prompt(TEXT))

    async def busy() -> None:
        assert all_.best_for_decode(prompt(TEXT))[0] in (second, third)

    asyncio.run(first.answer(busy(), 5 * prompt(TEXT).tokens))
    assert all_.best_for_decode(prompt(TEXT))[0] is first

    async def both() -> None:
        assert first.waiting > 0.2

    asyncio.run(first.answer(first.answer(both(), 0.2), 0.1))
    assert first.waiting == 0.0, "nothing that rounding left"


def test_addresses_of_events() -> None:
    known = address("http://h:1?events=5557&events=6000/7000&pool=5601", "--engine")
    assert known.url == "http://h:1"
    assert known.events == (Publisher("h", 5557, 5558), Publisher("h", 6000, 7000))
    assert known.pool == Publisher("h", 5601, 5602)
    for wrong in ("events=", "events=x", "events=1/y", "events=65535", "events=0", "pool=-1"):
        with pytest.raises(ConfigError, match="is not a port"):
            address(f"http://h:1?{wrong}", "--engine")
    for wrong in ("event=1", "pool=1&pool=2"):
        with pytest.raises(ConfigError, match="unknown or given twice"):
            address(f"http://h:1?{wrong}", "--engine")
