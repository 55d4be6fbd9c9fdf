"""``bench compression``: what lossless compression makes of a model's KV and of random
bytes, and how long hits take with and without it behind links of several speeds.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvrecall.bench.pool import NAMESPACE, get_all, keys_of, put_all, slots_of
from kvrecall.bench.report import Report, Times, progress
from kvrecall.config import Compression, RemoteConfig
from kvrecall.errors import ConfigError
from kvrecall.pool.arena import Arena
from kvrecall.pool.compression import CODECS, FRAME_BYTES, Codec, Compressor, unpack
from kvrecall.pool.remote.compressed import CompressedStore
from kvrecall.pool.remote.store import Object, Store
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall_lab.bench.needle.words import sentences

BLOCK_BYTES = 1 << 20
_LINKS = (0.125, 0.25, 1.0, 4.0)  # GB/s: 1, 2, 8 and 32 Gbit/s
_DEFAULT_LINK = 0.25
_TOKENS = 8192
_WAYS: tuple[Compression, ...] = ("none", *CODECS, "auto")
_WARM_UP = 8  # blocks


def measure_compression(
    codec: Annotated[str, typer.Option(help="Codec of the figures in JSON: zstd or lz4.")] = "zstd",
    model: Annotated[Path, typer.Option(help="Folder of the model whose KV is compressed.")] = Path(
        "models/recall-tiny"
    ),
    blocks: Annotated[int, typer.Option(min=16, help="Blocks of 1 MiB in a hit.")] = 64,
    repetitions: Times = 3,
) -> Report:
    """Lossless compression of KV: ratios, speeds, and what a hit takes behind slow links."""
    if codec not in CODECS:
        raise ConfigError(f"--codec is {codec!r}; allowed: {', '.join(CODECS)}")
    progress(f"computing KV of {_TOKENS:,} tokens with {model}")
    keys, values = kv_of(model, _TOKENS)
    noise = np.frombuffer(os.urandom(keys.nbytes), np.uint8)
    material = {"keys": keys, "values": values, "random bytes": noise}
    tried = {
        (name, what): _try(Compressor(name), data)
        for name in CODECS
        for what, data in material.items()
    }
    progress(f"hits of {blocks} MiB behind links of {', '.join(map(str, _LINKS))} GB/s")
    filling = np.resize(np.concatenate([keys, values]), blocks * BLOCK_BYTES)
    hits = {link: _hits(filling, blocks, link, repetitions) for link in _LINKS}
    return _report(codec, model, tried, hits)


def kv_of(model: Path, tokens: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bytes (uint8) of the keys and of the values of a text's first ``tokens``, in bfloat16, layer
    by layer as [heads, tokens, head size]. Raises ConfigError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (model / "config.json").is_file():
        raise ConfigError(f"--model: {model} is no folder of a model")
    rng = random.Random(1)
    words = " ".join(itertools.islice(sentences(rng), tokens // 4))
    ids = AutoTokenizer.from_pretrained(model)(words, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ConfigError(f"--model: its tokenizer makes {ids.shape[1]} tokens of the text")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = network(ids, use_cache=True, logits_to_keep=1).past_key_values
    both = [
        torch.stack([getattr(layer, side)[0] for layer in cache.layers])
        for side in ("keys", "values")
    ]
    keys, values = (side.contiguous().view(torch.uint8).numpy().reshape(-1) for side in both)
    return keys, values


def _try(compressor: Compressor, data: np.ndarray[Any, Any]) -> Mapping[str, float]:
    """Ratio, GB of plain bytes a second to pack and to unpack by processor time, and whether the
    bytes return."""
    view = data.data
    parts = [view[at : at + BLOCK_BYTES] for at in range(0, view.nbytes, BLOCK_BYTES)]
    room = memoryview(bytearray(BLOCK_BYTES + FRAME_BYTES))
    into = memoryview(bytearray(BLOCK_BYTES))
    stored = 0
    packing = unpacking = 0.0
    equal = True
    for part in parts:
        began = time.thread_time()
        nbytes = compressor.pack(part, room)
        packed = time.thread_time()
        there = unpack(room[:nbytes], into[: part.nbytes])
        unpacking += time.thread_time() - packed
        packing += packed - began
        stored += nbytes
        equal = equal and there and into[: part.nbytes] == part
    return {
        "ratio": view.nbytes / stored,
        "pack": view.nbytes / packing / 1e9,
        "unpack": view.nbytes / unpacking / 1e9,
        "equal": equal,
    }


class _Link:
    """A store in memory behind a link of so many bytes a second, which all calls share."""

    exposed = ""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._values: dict[str, bytes] = {}
        self._free_at = 0.0

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self._values for name in names]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        return self._each(objects, self._put)

    def get(self, objects: Sequence[Object]) -> list[bool]:
        sizes = self._get_all(objects)
        return [size == item.nbytes for item, size in zip(objects, sizes, strict=True)]

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        return self._get_all(objects)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._values.pop(name, None)

    def close(self) -> None:
        self._values.clear()

    def _put(self, item: Object) -> bool:
        self._values[item.name] = b"".join(item.parts)
        self._travel(item.nbytes)
        return True

    def _get_all(self, objects: Sequence[Object]) -> list[int]:
        return self._each(objects, self._get)

    def _get(self, item: Object) -> int:
        value = self._values.get(item.name)
        if value is None or len(value) > item.nbytes:
            return -1
        self._travel(len(value))
        at = 0
        for part in item.parts:
            piece = value[at : at + part.nbytes]
            part[: len(piece)] = piece
            at += part.nbytes
        return len(value)

    def _each(self, objects: Sequence[Object], work: Callable[[Object], Any]) -> list[Any]:
        return [work(item) for item in objects]

    def _travel(self, nbytes: int) -> None:
        """Waits until that many bytes have crossed the link."""
        now = time.perf_counter()
        self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        while (left := self._free_at - time.perf_counter()) > 0:
            time.sleep(left)


def _hits(
    filling: np.ndarray[Any, Any], blocks: int, link: float, repetitions: int
) -> dict[str, float]:
    """Seconds of a hit of ``blocks`` blocks over a link of so many GB a second: the least of some
    turns, in which all ways alternate."""
    arena = Arena.create(blocks * BLOCK_BYTES, background=False)
    arena.memory[:] = filling.data
    slots = slots_of(arena, blocks, BLOCK_BYTES)
    keys = keys_of(blocks)
    tiers: dict[str, RemoteTier] = {}
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    try:
        for way in _WAYS:
            tiers[way] = _tier(way, arena, link)
            put_all(tiers[way], keys[:_WARM_UP], slots[:_WARM_UP], BLOCK_BYTES)
            get_all(tiers[way], keys[:_WARM_UP], slots[:_WARM_UP])  # `auto` knows the link now
            tiers[way].drop(keys[:_WARM_UP])
            put_all(tiers[way], keys[_WARM_UP:], slots[_WARM_UP:], BLOCK_BYTES)
        for _ in range(repetitions):
            for way in _WAYS:
                seconds[way].append(get_all(tiers[way], keys[_WARM_UP:], slots[_WARM_UP:]))
        if bytes(arena.memory) != filling.tobytes():
            raise ConfigError("a hit brought other bytes")
    finally:
        for tier in tiers.values():
            tier.close()
        slots.clear()
        arena.close()
    return {way: min(some) for way, some in seconds.items()}


def _tier(way: Compression, arena: Arena, link: float) -> RemoteTier:
    store: Store = _Link(link * 1e9)
    if way != "none":
        store = CompressedStore(store, way)
    most = 2 * arena.nbytes
    tier = RemoteTier(store, RemoteConfig("link", max_queued_bytes=most, call_deadline_s=60.0))
    tier.register(NAMESPACE, BLOCK_BYTES)
    return tier


def _report(
    codec: str,
    model: Path,
    tried: Mapping[tuple[Codec, str], Mapping[str, float]],
    hits: Mapping[float, Mapping[str, float]],
) -> Report:
    rows = [
        (
            f"{what}, {name}",
            f"{found['ratio']:.2f}",
            f"{found['pack']:.2f}",
            f"{found['unpack']:.2f}",
            "yes" if found["equal"] else "NO",
        )
        for (name, what), found in tried.items()
    ]
    notes = [
        f"hit over {link} GB/s, ms: "
        + ", ".join(f"{way} {seconds * 1e3:.0f}" for way, seconds in some.items())
        for link, some in hits.items()
    ]
    chosen = {what: found for (name, what), found in tried.items() if name == codec}
    both = chosen["keys"], chosen["values"]
    slow = hits[_DEFAULT_LINK]
    figures = {
        "model": str(model),
        "codec": codec,
        "ratio_keys": round(both[0]["ratio"], 3),
        "ratio_values": round(both[1]["ratio"], 3),
        "ratio_random": round(chosen["random bytes"]["ratio"], 3),
        "pack_gb_s_core": round(min(one["pack"] for one in both), 3),
        "unpack_gb_s_core": round(min(one["unpack"] for one in both), 3),
        "equal": all(found["equal"] for found in tried.values()),
        "link_gb_s": _DEFAULT_LINK,
        "hit_s_plain": round(slow["none"], 4),
        "hit_s_compressed": round(slow[codec], 4),
        "hit_s_auto": round(slow["auto"], 4),
        "hits": {str(link): dict(some) for link, some in hits.items()},
    }
    columns = ("", "ratio", "pack, GB/s a core", "unpack, GB/s a core", "equal")
    return Report("compression", columns, tuple(rows), figures, tuple(notes))
