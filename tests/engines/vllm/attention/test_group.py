"""The pages in which dense layers keep copies of offloaded sequences. See also device_cases.py."""

from __future__ import annotations

from kvrecall.engines.vllm.attention.group import KeptCopies


def test_sequences_have_pages_of_their_own_as_long_as_there_are_enough() -> None:
    copies = KeptCopies(8)
    one = copies.of("one", 3)
    assert one is not None
    first = one.pages.tolist()
    one.copied["layer"] = 3
    other = copies.of("other", 4)
    assert other is not None
    assert copies.of("one", 4) is one, "it has grown"
    assert one.pages[:3].tolist() == first
    assert sorted([*one.pages, *other.pages]) == list(range(8))
    assert copies.of("third", 1) is None
    assert copies.of("one", 5) is None, "it gave up its pages"
    third = copies.of("third", 4)
    assert third is not None
    assert sorted([*third.pages, *other.pages]) == list(range(8))
    copies.forget("other")
    copies.forget("unknown")
    again = copies.of("one", 4)
    assert again is not None
    assert not again.copied, "what it had is not there"
    assert sorted([*third.pages, *again.pages]) == list(range(8))


def test_nothing_is_kept_without_pages() -> None:
    assert KeptCopies(0).of("one", 1) is None
