"""Tries a shape: one engine without a pool, one that fills the pool, and one for each tier below it
or beside it after ``kill -9``; every reply is compared with that of a hit on the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from kvrecall.errors import EngineError, KvrecallError
from kvrecall.gpu_check import reason
from kvrecall.pool.remote.mooncake.settings import package_folder
from kvrecall_lab.engines.engine import Admission, Answer, EngineProcess, Engines, Question
from kvrecall_lab.identity.trial import distance
from kvrecall_lab.shapes.cases import Case, ask, cases_of, loads_of, on_and_off, rise, trust
from kvrecall_lab.shapes.node import POOL, Node, node
from kvrecall_lab.shapes.ranks import Saved, recalled, saved_by
from kvrecall_lab.shapes.row import Row, difference, from_tier, is_rounded, needed_bytes
from kvrecall_lab.shapes.shapes import Shape, environment

_WAIT_S = 60.0
_BATCHED = ("samples", "preempted")
_ATTEMPTS = 3
"""Sums may depend on which requests a step computes together, and that on when each is loaded: what
is asked together and differs is asked again."""
_RANKS = ((1, 2), (2, 1))


class RefusedError(EngineError):
    """An engine does not start."""


class Alone:
    """The engine without a pool, and what it answers on a hit on the device."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        memory = engine.memory()
        self.cache_tokens: int = memory["blocks"] * memory["groups"][0]["block_size"]
        self.answers: dict[str, Answer] = {}
        self.together: dict[str, Answer] = {}
        """Of requests that are asked together: in one batch, sums may be taken in another order."""

    def learn(self, case: Case) -> None:
        """Has each prompt computed, and asks at once again, so that it is a hit."""
        for saved, asked in zip(case.saved, case.asked, strict=True):
            if asked.id not in self.answers:
                self._engine.forget_device()
                ask(self._engine, saved)
                (self.answers[asked.id],) = ask(self._engine, asked)
        if case.name == "preempted" and not self.together:
            self._engine.forget_device()
            for saved in case.saved:
                ask(self._engine, saved)
            self.together = {one.id: one for one in ask(self._engine, *case.asked)}

    def resumed(self, saved: Question, asked: Question, so_far: Sequence[int], end: int) -> Answer:
        """The rest of an answer of which ``so_far`` is known, on a hit up to token ``end``."""
        self._engine.forget_device()
        ask(self._engine, saved)
        if end > len(asked.prompt):  # tokens of the answer keep the KV with which it was decoded
            ask(self._engine, replace(asked, max_tokens=len(so_far)))
        left = asked.max_tokens - len(so_far)
        prompt = (*asked.prompt, *so_far)
        return ask(self._engine, replace(asked, prompt=prompt, max_tokens=left))[0]


class Laboratory:
    """Tries shapes, in any thread. Owns everything in ``folder``. ``say`` gets what is done."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._say = say
        self._writing = threading.Lock()  # models are drawn from torch's one generator
        self._nodes = count(1)
        self.engines = Engines(folder)

    def rows(self, shape: Shape, tiers: Sequence[str]) -> list[Row]:
        """The rows of a shape. An engine that fails is a row, the last one."""
        found: list[Row] = []
        lacks_mooncake = "mooncake" in tiers and package_folder() is None
        if lacks_mooncake:
            tiers = [tier for tier in tiers if tier != "mooncake"]
        try:
            found.extend(self._rows(shape, tiers) if tiers else ())
            if shape.ranks:
                found.extend(self.ranks_rows(shape, tiers))
            if lacks_mooncake:
                why = "Mooncake is not installed"
                found.append(Row(shape.name, "mooncake", run=False, why=why))
        except KvrecallError as error:
            if self.engines.is_stopped:
                raise
            refused = isinstance(error, RefusedError) and not found
            found.append(Row(shape.name, run=not refused, why=reason(str(error))))
        return found

    def _rows(self, shape: Shape, tiers: Sequence[str]) -> Iterator[Row]:
        arguments = self._arguments(shape)
        pool = self._folder / "pools" / shape.name
        below: dict[str, dict[str, Any]] = {
            "disk": {"disk_path": str(pool / "disk"), "disk_size": "1GiB"},
            "remote": {"remote": {"kind": "objects", "url": f"file://{pool / 'remote'}"}},
        }
        own = [tier for tier in tiers if tier == "host" or tier in below]
        lower = [tier for tier in own if tier in below]
        settings = {**POOL, **shape.pool}
        for tier in lower:
            settings |= below[tier]
        with ExitStack() as stack:
            # The first with the pool: a shape that it refuses needs no other engine.
            pools = [{"pool": settings}] if own else []
            engines = [
                stack.enter_context(self._engine(shape, {**arguments, **more}))
                for more in (*pools, shape.alone)
            ]
            first, alone = engines[0], Alone(engines[-1])
            shape = shape.on(first.memory()["groups"])
            cases = {tier: cases_of(shape, tier) for tier in tiers}
            if own:
                _fill(first, cases[own[0]])
            for case in chain.from_iterable(cases.values()):
                alone.learn(case)
            if "host" in own:
                yield from _tier(shape, first, "host", cases["host"], alone)
            if own:
                _await_writes(pool)
                first.kill()
            for tier in lower:
                found = {**POOL, **shape.pool, **below[tier]}
                with self._engine(shape, {**arguments, "pool": found}) as engine:
                    trust(engine, shape, cases[tier][-1].saved[-1])
                    yield from _tier(shape, engine, tier, cases[tier], alone, restarted=True)
            if shared := [tier for tier in tiers if tier not in own]:
                yield from self._shared_rows(shape, arguments, shared, cases, alone)

    def _shared_rows(
        self,
        shape: Shape,
        arguments: Mapping[str, Any],
        tiers: Sequence[str],
        cases: Mapping[str, Sequence[Case]],
        alone: Alone,
    ) -> Iterator[Row]:
        """What an engine saved in a pool service and, through it, in Mooncake, recalled after
        ``kill -9`` of that engine: by another one of the service, and by one with a pool of its own
        on Mooncake."""
        with self._node(shape, tiers) as place:
            joined, apart = ({**pool, **shape.pool} for pool in (place.joined, place.apart))
            with self._engine(shape, {**arguments, "pool": joined}) as one:
                _fill(one, cases[tiers[0]])
                one.kill()
            for tier in tiers:
                pool = joined if tier == "service" else apart
                with self._engine(shape, {**arguments, "pool": pool}) as other:
                    trust(other, shape, cases[tier][-1].saved[-1])
                    yield from _tier(shape, other, tier, cases[tier], alone, restarted=True)

    def ranks_rows(self, shape: Shape, tiers: Sequence[str]) -> Iterator[Row]:
        """What engines of one tensor-parallel rank wrote, engines of two recall, and back: one
        after the other on a disk, at the same time on a pool service, and after ``kill -9`` of both
        from Mooncake."""
        arguments = self._arguments(shape)
        prompts = {ranks: on_and_off(shape, f"ranks {ranks}") for ranks in (1, 2)}

        def engine(ranks: int, pool: Mapping[str, Any]) -> AbstractContextManager[EngineProcess]:
            return self._engine(shape, {**arguments, "tensor_parallel_size": ranks, "pool": pool})

        if "disk" in tiers:
            folder = self._folder / "pools" / f"{shape.name}-ranks"
            pool = {**POOL, "disk_path": str(folder), "disk_size": "1GiB"}
            written: list[Saved] = []
            for readers, writes in ((1, True), (2, True), (1, False)):
                with engine(readers, pool) as one:
                    if written:
                        pair = 3 - readers, readers
                        yield recalled(one, shape, written, "disk", pair, True)
                    if writes:
                        written = saved_by(one, prompts[readers])
                        _await_writes(folder)
                        one.kill()
        if not (shared := [tier for tier in tiers if tier in ("service", "mooncake")]):
            return
        with self._node(shape, shared) as place:
            with engine(1, place.joined) as one, engine(2, place.joined) as two:
                both = {1: one, 2: two}
                of = {ranks: saved_by(each, prompts[ranks]) for ranks, each in both.items()}
                for writers, readers in _RANKS if "service" in tiers else ():
                    pair = writers, readers
                    yield recalled(both[readers], shape, of[writers], "service", pair)
                one.kill()
                two.kill()
            for writers, readers in _RANKS if "mooncake" in tiers else ():
                with engine(readers, place.apart) as other:
                    pair = writers, readers
                    yield recalled(other, shape, of[writers], "mooncake", pair, True)

    def _arguments(self, shape: Shape) -> dict[str, Any]:
        with self._writing:
            model = shape.write(self._folder / "models")
        return shape.arguments(model, self._folder / "cache")

    def _node(self, shape: Shape, tiers: Sequence[str]) -> AbstractContextManager[Node]:
        folder = self._folder / "nodes" / f"{shape.name}-{next(self._nodes)}"
        return node(folder, "mooncake" in tiers)

    @contextmanager
    def _engine(self, shape: Shape, arguments: Mapping[str, Any]) -> Iterator[EngineProcess]:
        engine = self.engines.start(shape.name, arguments, environment=environment())
        try:
            self._say(f"{shape.name}: an engine starts")
            try:
                engine.wait_ready()
            except EngineError as error:
                raise RefusedError(str(error)) from error
            self._say(f"{shape.name}: asking")
            yield engine
        finally:
            self.engines.end(engine)


def _fill(engine: EngineProcess, cases: Sequence[Case]) -> None:
    """Has every prompt computed and saved."""
    for case in cases:
        for question in case.saved:
            ask(engine, question)


def _tier(
    shape: Shape,
    engine: EngineProcess,
    tier: str,
    cases: Sequence[Case],
    alone: Alone,
    restarted: bool = False,
) -> Iterator[Row]:
    memory = engine.memory()
    for case in cases:
        engine.admissions()
        before = engine.metrics()
        loads: list[tuple[int, int]] = []
        attempts = came = 0
        while attempts < _ATTEMPTS:
            attempts += 1
            engine.forget_device()
            if case.name == "preempted":
                answers = ask(engine, *case.asked)
            else:
                answers = [ask(engine, question)[0] for question in case.asked]
            came += from_tier(answers, tier)
            admissions = engine.admissions()
            loads += loads_of(admissions)
            truth = [
                _truth(alone, saved, asked, answer, admissions)
                for saved, asked, answer in zip(case.saved, case.asked, answers, strict=True)
            ]
            if case.name not in _BATCHED or not difference(answers, truth):
                break
        after = engine.metrics()
        yield Row(
            shape.name,
            tier,
            case.name,
            groups=len(memory["groups"]),
            hybrid_manager=memory["hybrid_manager"],
            restarted=restarted,
            why=difference(answers, truth),
            equal=not difference(answers, truth),
            rounded=is_rounded(answers, truth),
            deviation=max(map(distance, answers, truth)),
            hit_tokens=sum(one.cached for one in answers),
            tier_tokens=came,
            device_tokens=sum(one.cached for one in truth),
            bytes_moved=rise("kvrecall_loaded_bytes_total", before, after),
            bytes_needed=needed_bytes(memory["groups"], loads),
            attempts=attempts,
            preemptions=rise("vllm:num_preemptions_total", before, after),
            device_blocks=(
                memory["blocks"],
                alone.cache_tokens // memory["groups"][0]["block_size"],
            ),
        )


def _truth(
    alone: Alone,
    saved: Question,
    asked: Question,
    answer: Answer,
    admissions: Sequence[Admission],
) -> Answer:
    """What the engine without a pool answers on a hit; after a preemption, to the prompt with what
    had been answered by then. Where the answer is that of requests in one batch: that."""
    whole = alone.answers[asked.id]
    for one in admissions:
        known = one.tokens - len(asked.prompt)
        if one.id == asked.id and known > 0:
            rest = alone.resumed(saved, asked, answer.tokens[:known], one.end)
            tokens = (*whole.tokens[:known], *rest.tokens)
            whole = replace(whole, tokens=tokens, scores=(*whole.scores[:known], *rest.scores))
    together = alone.together.get(asked.id, whole)
    return together if not difference([answer], [together]) else whole


def _await_writes(pool: Path) -> None:
    """Waits until nothing more is written below ``pool``."""
    end = time.monotonic() + _WAIT_S
    seen = -1
    while time.monotonic() < end:
        files = sum(1 for file in pool.rglob("*") if file.is_file())
        if files == seen:
            return
        seen = files
        time.sleep(1.0)
