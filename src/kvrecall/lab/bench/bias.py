"""What each benchmark favours, by the name of its report. Nobody should have to guess."""

from __future__ import annotations

from collections.abc import Mapping

BIAS: Mapping[str, str] = {
    "conversations": (
        "for caches: every session asks again what it asked before, and the device holds a quarter "
        "of it; against them: a small model computes its prompts quickly, and clients, engines and "
        "stores share the cores"
    ),
    "replay": (
        "for caches: the beginning of a trace, before anything has to be evicted for long; against "
        "them: blocks of 512 tokens shrunk to a few dozen, so a hit saves little computing"
    ),
    "restore": (
        "for recall: one request at a time, one long prefix that is hit as a whole; against it: a "
        "small model, so computing is cheap"
    ),
    "overhead": "against the pool: nothing is ever asked again, so saving can only cost",
    "throttle": "for neither: a disk of known bandwidth, one hit at a time",
    "service": "for the service: two clients that do nothing else",
    "lookup": "for the pool: one caller, keys that are all there or all absent",
    "disk": "for the tier: large blocks in deep queues; against it: checksums, and durable writes",
    "tiers": (
        "for libraries of few, large calls (as ours is): requests of 16 blocks of 1 MiB, by one "
        "thread; for buffered files: what is read warm comes from the page cache; against ours: "
        "of the libraries only it waits until a write is durable and verifies what it reads"
    ),
    "remote": "for both alike: loopback instead of a network, one request at a time",
    "decode": (
        "for retrieval: long contexts, attention alone and not the rest of the model; against it: "
        "random keys, among which no block stands out"
    ),
    "crowd": "for retrieval: as many sequences as dense attention has no room for",
    "needle": (
        "for retrieval: few facts in much filler; against it: questions whose answer one block "
        "holds, so that a block not chosen is an answer lost"
    ),
}
