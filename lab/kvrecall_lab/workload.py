"""Synthetic workloads, for evaluation outside of the tuning set, and replays with hints.

Every workload is a function of a seed and gives the same trace each time. Blocks are 512 tokens;
only full blocks appear (unlike Mooncake's traces, whose last id of a request may be partial).

    python -m kvrecall_lab.workload scan > scan.jsonl       # for `kvrecall simulate scan.jsonl`
    python -m kvrecall_lab.workload agents honest 2000      # rates in so many blocks, with hints
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from kvrecall.block import SHARED, Tenant
from kvrecall.pool.hints import Hint, HintCounts, HintRecord
from kvrecall.simulate.replay import (
    BLOCKS,
    ReplayOutcome,
    SimulatedPool,
    TierSpec,
    clairvoyant_hits,
    tiers_of,
)
from kvrecall.simulate.trace import BLOCK_TOKENS, Trace, trace_of

Row = tuple[float, list[int]]
HintedRow = tuple[float, list[int], Hint | None, Tenant]
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


def tool_loops(seed: int) -> Iterator[Row]:
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


@dataclass(frozen=True, slots=True)
class _Tool:
    """A kind of tool: its share of the calls, and how long one takes."""

    share: float
    median_s: float
    sigma: float


_TOOLS = (
    _Tool(0.62, 2.0, 0.8),  # reads and searches
    _Tool(0.24, 12.0, 0.8),  # edits, linters
    _Tool(0.10, 75.0, 0.7),  # builds and tests
    _Tool(0.04, 420.0, 0.9),  # a person is asked
)
_ANSWER_TOKENS = 444  # median; at 50 a second
_TOKENS_A_SECOND = 50.0
_LIMIT_TOKENS = 260_000  # of a prompt: then the session is compacted


class _Agents:
    """Sessions of coding agents: the requests of each, and what their clients could say of them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._ids = _Ids()
        self.rows: list[tuple[float, list[int], Hint, int]] = []
        self._heads = [self._ids.take(self._rng.randint(16, 32)) for _ in range(4)]
        self._sub_heads = [self._ids.take(14) for _ in self._heads]  # of sub-agents, by role

    def session(self, start: float, tenant: int = 0) -> None:
        """A session with its sub-agents, from ``start`` on, of one of the tenants."""
        rng = self._rng
        role = rng.choices(range(4), (8, 4, 2, 1))[0]
        head = self._heads[role]
        turns = max(1, round(rng.lognormvariate(math.log(43), 0.75)))
        tokens = len(head) * BLOCK_TOKENS + int(rng.lognormvariate(math.log(84_000), 0.5))
        now, chain = start, list(head)
        for turn in range(turns):
            chain += self._ids.take(max(0, tokens // BLOCK_TOKENS - len(chain)))
            answer = int(rng.lognormvariate(math.log(_ANSWER_TOKENS), 0.9))
            grown = tokens + answer + int(min(40_000, rng.lognormvariate(math.log(2_000), 1.0)))
            answered_s = answer / _TOKENS_A_SECOND
            is_over, is_compacted = turn == turns - 1, grown > _LIMIT_TOKENS
            tool = self._call(_TOOLS)
            wait = expected = answered_s + tool.median_s
            wait = answered_s + rng.lognormvariate(math.log(tool.median_s), tool.sigma)
            if not is_over and rng.random() < 0.03:
                expected = 120.0
                task = self._ids.take(10)
                wait = max(
                    self._sub_agent(now + answered_s, self._sub_heads[role] + task, tenant) - now
                    for _ in range(rng.randint(1, 3))
                )
            returns = not is_over and not is_compacted
            hint = Hint(returns, expected if returns else None)
            self.rows.append((now, list(chain), hint, tenant))
            now += wait
            tokens = grown
            if is_compacted:  # to its beginning and a summary
                chain = list(head)
                summary = int(rng.lognormvariate(math.log(9_000), 0.4))
                tokens = len(head) * BLOCK_TOKENS + summary

    def _sub_agent(self, start: float, shared: list[int], tenant: int) -> float:
        """A sub-agent that begins with ``shared``; returns when it ends."""
        rng, now, chain = self._rng, start, list(shared)
        tokens = len(chain) * BLOCK_TOKENS
        turns = 2 + int(rng.lognormvariate(math.log(7), 0.6))
        for turn in range(turns):
            tokens += int(rng.lognormvariate(math.log(2_500), 0.9))
            chain += self._ids.take(tokens // BLOCK_TOKENS - len(chain))
            tool = self._call(_TOOLS[:3])
            returns = turn < turns - 1
            hint = Hint(returns, tool.median_s + 5.0 if returns else None)
            self.rows.append((now, list(chain), hint, tenant))
            now += rng.lognormvariate(math.log(tool.median_s), tool.sigma)
            now += rng.expovariate(_TOKENS_A_SECOND / 300)
        return now

    def _call(self, tools: Sequence[_Tool]) -> _Tool:
        return self._rng.choices(tools, [tool.share for tool in tools])[0]


def agents(seed: int, hints: str = "none", sessions: int = 40) -> Iterator[HintedRow]:
    """Sessions of coding agents in the shape that is published of them: a median of 43 turns,
    142,000 tokens in and 444 out, more than 95 % of a prompt seen before (AgentX, vLLM's blog,
    2026-09-08). Begun within 45 minutes.

    A session returns when its tool is done: mostly after seconds, sometimes after a build or after
    a person has answered. Sub-agents share their beginning, and the task with their siblings; the
    session returns when the last of them is done. A prompt that would be longer than 260,000
    tokens is compacted: it continues with its beginning and a summary.

    ``hints``: one of ``HINTS``; or ``MIXED``: every third session is of a tenant whose clients are
    honest, every third of one that says nothing, every third of a liar. Tenants share no block.
    """
    made = _Agents(seed)
    rng = random.Random(seed)
    kinds = _MIXED_KINDS if hints == MIXED else (hints,)
    for number in range(sessions):
        made.session(rng.uniform(0.0, 2700.0), number % len(kinds))
    for now, chain, hint, tenant in sorted(made.rows, key=lambda row: row[0]):
        given = HINTS[kinds[tenant]](rng, hint)
        if hints == MIXED:
            own = tenant * _ID_SPACE
            yield now, [own + number for number in chain], given, Tenant(kinds[tenant])
        else:
            yield now, chain, given, SHARED


def _noisy(rng: random.Random, hint: Hint) -> Hint | None:
    if rng.random() < 0.2:
        return None
    if rng.random() < 0.2:
        return Hint(not hint.returns)
    in_s = None if hint.in_s is None else hint.in_s * rng.lognormvariate(0.0, 1.0)
    return hint._replace(in_s=in_s)


def _lying(rng: random.Random, hint: Hint) -> Hint | None:
    if hint.returns:
        return Hint(False)
    return Hint(True, rng.uniform(1.0, 60.0), pin_s=3600.0)


HINTS: dict[str, Callable[[random.Random, Hint], Hint | None]] = {
    "honest": lambda rng, hint: hint,
    "noisy": _noisy,
    "none": lambda rng, hint: None,
    "lying": _lying,
}
"""What clients make of the truth. Honest: whether the session returns, and the usual time of its
tool. Noisy: a fifth is not given, of the rest a fifth says the opposite, and the times are off by a
factor of e. Lying: the opposite of the truth, always, with pins for what never returns."""

MIXED = "mixed"
_MIXED_KINDS = ("honest", "none", "lying")
_ID_SPACE = 1 << 48  # of a tenant's blocks


WORKLOADS: dict[str, Callable[[int], Iterator[Row]]] = {
    "chat-lognormal": lambda seed: chat(seed, _lognormal(60.0, 1.0)),
    "chat-exponential": lambda seed: chat(seed, _exponential(120.0)),
    "chat-pareto": lambda seed: chat(seed, _pareto(20.0, 0.9)),
    "chat-two-moods": lambda seed: chat(seed, _two_moods),
    "tool-loops": tool_loops,
    "agents": lambda seed: ((now, chain) for now, chain, _, _ in agents(seed)),
    "document-qa": document_qa,
    "document-qa-drift": lambda seed: document_qa(seed, drift=True),
    "scan": scan,
    "loop": loop,
}
"""Made-up workloads by name."""


def make_workload(name: str, seed: int = 0, hours: float = 2.0) -> Trace:
    """The workload ``name``, cut off after ``hours``."""
    return trace_of(name, (row for row in WORKLOADS[name](seed) if row[0] < hours * 3600.0))


@dataclass(slots=True)
class HintedOutcome(ReplayOutcome):
    """With the hints of the clients, and what came of them, and the shares of the tenants."""

    client_hints: HintCounts = field(default_factory=HintCounts)
    tenants: dict[Tenant, ReplayOutcome] = field(default_factory=lambda: defaultdict(ReplayOutcome))


def replay_hinted(rows: Iterable[HintedRow], capacity: int, policy: str) -> HintedOutcome:
    """Replays requests with hints against one tier of so many blocks."""
    rows = list(rows)
    trace = trace_of("hinted", [(now, chain) for now, chain, _, _ in rows])
    pool = SimulatedPool(tiers_of([TierSpec("host", capacity)], policy), BLOCKS)
    outcome, hints = HintedOutcome(), HintRecord()
    for request, (_, _, hint, tenant) in zip(trace.requests, rows, strict=True):
        advice = hints.used(request.chain, request.now, tenant, hint)
        hits = pool.serve(request.chain, request.now, advice)
        for count in (outcome, outcome.tenants[tenant]):
            count.accesses += len(request.chain)
            count.hits += hits
    outcome.client_hints = hints.counts
    return outcome


def main(name: str, hints: str = "", capacity: str = "2000") -> None:
    if not hints:
        for now, chain in WORKLOADS[name](0):
            print(json.dumps({"timestamp": now * 1000, "hash_ids": chain}))
        return
    rows = list(agents(0, hints))
    trace = trace_of(name, [(now, chain) for now, chain, _, _ in rows])
    line: dict[str, object] = {"best": clairvoyant_hits(trace, int(capacity)) / trace.blocks}
    for policy in ("lru", "hazard"):
        outcome = replay_hinted(rows, int(capacity), policy)
        rates = {tenant: round(share.hit_rate, 6) for tenant, share in outcome.tenants.items()}
        line[policy] = {"hit_rate": round(outcome.hit_rate, 6), "tenants": rates}
        line["client_hints"] = asdict(outcome.client_hints)
    print(json.dumps(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
