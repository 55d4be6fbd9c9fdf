"""Bytes as a stranger writes them, for decoders of what comes from outside the process: valid ones,
spoiled, or anything; and a limit to the memory that reading them takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_LENGTHS = (0, 1, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_DEEP = (b"[", b'{"a":', b"\x91", b"\x81\xa1a", b'"', b"\\u", b"9", b"\n", b"\xff", b"\0")


def fuzz(examples: int = 300) -> settings:
    """So many examples of a test, and thirty times as many in ``make test-all``."""
    factor = 1 if settings.default is None or settings.default.derandomize else 30
    return settings(
        max_examples=factor * examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


@st.composite
def spoiled(draw: st.DrawFn, *valid: bytes) -> bytes:
    """One of ``valid`` with up to four changes of the kinds that find mistakes in decoders."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        some = draw(st.integers(0, 40))
        match draw(st.sampled_from("flip cut insert length end splice repeat deep".split())):
            case "flip" if at < len(data):
                data[at] ^= 1 << some % 8
            case "cut":
                del data[at : at + some]
            case "insert":
                data[at:at] = draw(st.binary(max_size=40))
            case "length":
                size, order = draw(st.sampled_from([(4, "little"), (8, "little"), (4, "big")]))
                number = draw(st.sampled_from(_LENGTHS)) % (1 << 8 * size)
                data[at : at + size] = number.to_bytes(size, order)  # type: ignore[arg-type]
            case "end":
                del data[at:]
            case "splice":
                other = draw(st.sampled_from(valid))
                data[at:] = other[draw(st.integers(0, len(other))) :]
            case "repeat":
                data[at:at] = data[at : at + some] * draw(st.integers(0, 50))
            case "deep":
                data[at:at] = draw(st.sampled_from(_DEEP)) * draw(st.sampled_from([9, 300, 2000]))
    return bytes(data)


def hostile(*valid: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(spoiled(*valid), st.binary(max_size=200))


@contextmanager
def bounded(nbytes: int, beside: int = 1 << 20) -> Iterator[None]:
    """What runs inside allocates at most 200 times the ``nbytes`` it reads, and ``beside``."""
    tracemalloc.start()
    try:
        yield
        peak, most = tracemalloc.get_traced_memory()[1], 200 * nbytes + beside
        where = tracemalloc.take_snapshot().statistics("filename")[:3] if peak > most else []
    finally:
        tracemalloc.stop()
    assert peak <= most, f"{nbytes} bytes took {peak}, of which some are still held: {where}"


def outcome(
    read: Callable[[bytes], Any], data: bytes, *errors: type[Exception], beside: int = 1 << 20
) -> Any:
    """What ``read`` makes of ``data``, or the error, one of ``errors``, whose text is bounded."""
    with bounded(len(data), beside=beside):
        try:
            made = read(data)
        except errors as error:
            made = error.with_traceback(None)
    assert not isinstance(made, Exception) or len(str(made)) < 2000 + 4 * len(data)
    return made
