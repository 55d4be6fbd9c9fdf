"""Synthetic workloads, and variants of a given trace, for evaluation outside of the tuning set.

Every workload is a function of a seed and gives the same trace each time. Blocks are 512 tokens;
only full blocks appear (unlike Mooncake's traces, whose last id of a request may be partial).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator

from kvrecall.block import BlockKey
from kvrecall.errors import ConfigError
from kvrecall.simulate.trace import Request, Trace, block_key, trace_of

Row = tuple[float, list[int]]
Gap = Callable[[random.Random], float]


def _lognormal(median: float, sigma: float) -> Gap:
    return lambda rng: median * rng.lognormvariate(0.0, sigma)


def _exponential(mean: float) -> Gap:
    return lambda rng: rng.expovariate(1.0 / mean)


def _pareto(least: float, alpha: float) -> Gap:
    return lambda rng: least * rng.paretovariate(alpha)


def _two_moods(rng: random.Random) -> float:
    """Mostly immediate replies, some after a break."""
    return rng.lognormvariate(3.0, 0.4) if rng.random() < 0.75 else rng.lognormvariate(6.5, 0.4)


def _zipf(rng: random.Random, count: int, exponent: float) -> Iterator[int]:
    """Endless draws from 0..count-1, rank r with weight ``1 / (r + 1) ** exponent``."""
    cumulated = list(itertools.accumulate((r + 1.0) ** -exponent for r in range(count)))
    while True:
        yield from rng.choices(range(count), cum_weights=cumulated, k=256)


class _Ids:
    """Hands out block ids never used before, from ``first`` on."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _conversation(
    rng: random.Random, ids: _Ids, start: float, head: list[int], first: int, going_on: float,
    grow: int, gap: Gap,
) -> Iterator[Row]:  # fmt: skip
    """The requests of one session: each continues the last one with up to ``grow`` new blocks."""
    chain = head + ids.take(first)
    now = start
    while True:
        yield now, list(chain)
        if rng.random() >= going_on:
            return
        now += gap(rng)
        chain += ids.take(rng.randint(1, grow))


def chat(seed: int, gap: Gap, sessions: int = 3000, seconds: float = 3600.0) -> Iterator[Row]:
    """Sessions of 2.5 turns on average behind one of four system prompts of three blocks."""
    rng, ids = random.Random(seed), _Ids()
    heads = [ids.take(3) for _ in range(4)]
    which = _zipf(rng, len(heads), 1.0)
    for _ in range(sessions):
        first = 1 + int(rng.lognormvariate(1.6, 1.0))
        start = rng.uniform(0.0, seconds)
        yield from _conversation(rng, ids, start, heads[next(which)], first, 0.6, 4, gap)


def agents(seed: int) -> Iterator[Row]:
    """Tool-calling loops, a dozen quick turns each, behind six long system prompts."""
    rng, ids = random.Random(seed), _Ids()
    heads = [ids.take(12) for _ in range(6)]
    which = _zipf(rng, len(heads), 0.8)
    for _ in range(500):
        start, first = rng.uniform(0.0, 3600.0), rng.randint(1, 4)
        gap = _lognormal(6.0, 1.0)
        yield from _conversation(rng, ids, start, heads[next(which)], first, 0.92, 3, gap)


def document_qa(seed: int, drift: bool = False) -> Iterator[Row]:
    """Independent questions of one block to Zipf-popular documents; ``drift``: halfway other
    documents become the popular ones."""
    rng, ids = random.Random(seed), _Ids()
    documents = [ids.take(5 + int(rng.lognormvariate(3.3, 0.8))) for _ in range(600)]
    which = _zipf(rng, len(documents), 0.9)
    for index in range(4000):
        if drift and index == 2000:
            rng.shuffle(documents)
        yield index * 0.9, documents[next(which)] + ids.take(1)


def scan(seed: int) -> Iterator[Row]:
    """Chat, and once a minute a batch job of twenty long prompts that never come back."""
    yield from chat(seed, _lognormal(60.0, 1.0), sessions=2000)
    ids = _Ids(1 << 40)
    for minute, _ in itertools.product(range(60), range(20)):
        yield minute * 60.0 + 30.0, ids.take(60)


def loop(seed: int) -> Iterator[Row]:
    """250 documents of 30 blocks, read round and round: the worst case of recency."""
    ids = _Ids()
    documents = [ids.take(30) for _ in range(250)]
    for index in range(3000):
        yield index * 1.0, documents[index % len(documents)]


WORKLOADS: dict[str, Callable[[int], Iterator[Row]]] = {
    "chat-lognormal": lambda seed: chat(seed, _lognormal(60.0, 1.0)),
    "chat-exponential": lambda seed: chat(seed, _exponential(120.0)),
    "chat-pareto": lambda seed: chat(seed, _pareto(20.0, 0.9)),
    "chat-two-moods": lambda seed: chat(seed, _two_moods),
    "agents": agents,
    "document-qa": document_qa,
    "document-qa-drift": lambda seed: document_qa(seed, drift=True),
    "scan": scan,
    "loop": loop,
}
"""Made-up workloads by name."""


def make_workload(name: str, seed: int = 0, hours: float = 2.0) -> Trace:
    """The workload ``name``, cut off after ``hours``. Raises ConfigError if unknown."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload: {name!r} is unknown; known: {', '.join(WORKLOADS)}")
    rows = (row for row in WORKLOADS[name](seed) if row[0] < hours * 3600.0)
    return trace_of(f"synthetic:{name}", rows)


def part(trace: Trace, first: float, last: float) -> Trace:
    """The requests between two shares of the trace's length, by count."""
    count = len(trace.requests)
    requests = trace.requests[int(first * count) : int(last * count)]
    return Trace(f"{trace.name}[{first:g}:{last:g}]", requests)


def thinned(trace: Trace, every: int) -> Trace:
    """One session in ``every``. A session is known by the first of its blocks that less than one
    request in fifty has: what comes before are prompts that sessions share."""
    uses = Counter(key for request in trace.requests for key in request.chain)
    common = len(trace.requests) / 50

    def is_kept(request: Request) -> bool:
        own = next((key for key in request.chain if uses[key] < common), request.chain[-1])
        return random.Random(own).randrange(1 << 30) % every == 0

    kept = (request for request in trace.requests if request.chain and is_kept(request))
    return Trace(f"{trace.name}/{every}", tuple(kept))


def doubled(trace: Trace, later: float) -> Trace:
    """The trace laid over itself, ``later`` seconds apart: twice the load, nothing shared but
    the first block of each request."""
    twins: dict[BlockKey, BlockKey] = {}

    def twin(request: Request) -> Request:
        for key in request.chain[1:]:
            twins.setdefault(key, block_key(-1 - len(twins)))
        chain = request.chain[:1] + tuple(twins[key] for key in request.chain[1:])
        return Request(request.now + later, chain, request.is_partial)

    both = [*trace.requests, *map(twin, trace.requests)]
    return Trace(f"{trace.name}x2", tuple(sorted(both, key=lambda request: request.now)))
