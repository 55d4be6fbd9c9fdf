"""Reads request traces: one JSON object a line, Mooncake's format (FAST'25)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrecall.block import BlockKey
from kvrecall.errors import ConfigError

_COMPRESSED = {
    b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd",
    b"PK\x03\x04": "unzip",
}  # fmt: skip
_MOST_BYTES = 256 << 20  # which take some GiB as requests
BLOCK_TOKENS = 512
"""Of the format."""


class TraceError(ConfigError):
    """The trace cannot be replayed; the text names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its arrival in seconds and its blocks, prefix first.

    Equal keys mean equal blocks *and* equal prefixes (the ids of the format are chained).
    ``is_partial``: the last one has less than ``BLOCK_TOKENS`` tokens.
    """

    now: float
    chain: tuple[BlockKey, ...]
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. Blocks have ``BLOCK_TOKENS`` tokens."""

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def blocks(self) -> int:
        """Total block accesses, repeats included."""
        return sum(len(request.chain) for request in self.requests)


def trace_of(
    name: str,
    requests: Iterable[tuple[float, Sequence[int]] | tuple[float, Sequence[int], bool]],
) -> Trace:
    """A trace of (seconds, ids) pairs; sorted by time, equal times keep their order. A third
    element says whether the last block is partial."""
    known: dict[int, BlockKey] = {}
    rows = []
    for now, ids, *more in sorted(requests, key=lambda row: row[0]):
        for number in ids:
            if number not in known:
                known[number] = BlockKey(number.to_bytes(16, "little", signed=True))
        rows.append(TraceRequest(now, tuple(known[number] for number in ids), any(more)))
    return Trace(name, tuple(rows))


def read_trace(path: Path, advance: Callable[[int], None] = lambda _: None) -> Trace:
    """The trace in ``path``. Raises TraceError if it is unreadable, empty or malformed.

    A line needs ``timestamp`` (milliseconds) and ``hash_ids`` (one integer a block), and may have
    ``input_length`` (tokens); other fields are ignored, blank lines are skipped. A request without
    blocks counts but moves nothing.
    ``advance`` is called with the length of each line (progress).
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise TraceError(f"{path}: cannot be read: {why}") from error
    if len(raw) > _MOST_BYTES:
        raise TraceError(f"{path}: holds more than {_MOST_BYTES >> 20} MiB; replay a part of it")
    for magic, tool in _COMPRESSED.items():
        if raw.startswith(magic):
            raise TraceError(f"{path}: is compressed; unpack it first, with {tool}")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}: is not text (byte {error.start} is not UTF-8); a trace has one JSON object "
            "per line"
        ) from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        advance(len(line) + 1)
        if line.strip():
            rows.append(_row(f"{path}:{number}", line))
    if not any(ids for _, ids, _ in rows):
        raise TraceError(f"{path}: no request has hash_ids; a trace needs one that has")
    return trace_of(path.name, rows)


def _row(where: str, line: str) -> tuple[float, list[int], bool]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{where}: not a JSON object")
    for name in ("timestamp", "hash_ids"):
        if name not in row:
            raise TraceError(f"{where}: field {name!r} is missing")
    stamp, ids = row["timestamp"], row["hash_ids"]
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 1e15:
        raise TraceError(f"{where}: timestamp is {stamp!r:.80}; it must be milliseconds, 0 or more")
    if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 2**127 for i in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers, one a block")
    if len(set(ids)) != len(ids):
        raise TraceError(f"{where}: hash_ids names a block twice; ids must be chained hashes")
    length = row.get("input_length")
    is_partial = isinstance(length, int) and length < len(ids) * BLOCK_TOKENS
    return stamp / 1000.0, ids, is_partial
