"""Tries a shape: one engine without a pool, one that fills the pool, and one for each lower tier
after ``kill -9``; every reply is compared with that of a hit on the device."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from kvrecall.errors import EngineError
from kvrecall.lab.engines.engine import Admission, Answer, EngineProcess, Question
from kvrecall.lab.gpu_check.outcome import reason
from kvrecall.lab.identity.trial import distance
from kvrecall.lab.shapes.needed import needed_bytes
from kvrecall.lab.shapes.shapes import Shape, environment

TIERS = ("host", "disk", "remote")

_ANSWER = 16
_LONG_ANSWER = 320  # requests that begin together outgrow the device
_LETTERS = 250  # tokens that the models have one letter each for
_WAIT_S = 60.0
_ANSWER_S = 300.0
_BATCHED = ("samples", "preempted")
_ATTEMPTS = 3
"""Sums may depend on which requests a step computes together, and that on when each is loaded: what
is asked together and differs is asked again."""
_POOL = {
    "host_size": "256MiB",
    "async_write": False,  # what is answered is in the lower tier
    "load_or_compute": "load",
    "lookup_deadline": 5,  # a busy machine is no reason to compute
}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one kind, asked together. ``saved``: prompts that the pool is filled with;
    ``asked``: what is asked for then."""

    name: str
    saved: tuple[Question, ...]
    asked: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """What a case showed. ``run``: whether this machine runs the shape; ``why``: why not, or which
    reply differs. ``hit_tokens``: prompt tokens recalled, and ``device_tokens``: those that the
    engine without a pool recalls. ``attempts``: how often the case was asked.
    ``device_blocks``: with the pool and without."""

    model: str
    tier: str = ""
    case: str = ""
    run: bool = True
    why: str = ""
    groups: int = 0
    hybrid_manager: bool = False
    restarted: bool = False
    equal: bool = False
    deviation: float = 0.0
    hit_tokens: int = 0
    device_tokens: int = 0
    bytes_moved: int = 0
    bytes_needed: int = 0
    preemptions: int = 0
    attempts: int = 1
    device_blocks: tuple[int, int] = (0, 0)

    @property
    def ok(self) -> bool:
        """Whether the case shows what it must, if it could be tried."""
        return not self.run or not self.faults()

    def faults(self) -> list[str]:
        """What is wrong."""
        preempts = self.case == "preempted"
        checks = {
            f"replies differ from a device hit ({self.why})": not self.equal,
            "nothing recalled": not self.bytes_moved,
            "recalled less than the device": not preempts and self.hit_tokens < self.device_tokens,
            "moved more bytes than needed": self.bytes_moved > self.bytes_needed,
            "moved fewer bytes than needed": self.bytes_moved < self.bytes_needed,
            "nothing was preempted": preempts and not self.preemptions,
            "the pool takes device blocks": self.device_blocks[0] != self.device_blocks[1],
        }
        return [text for text, wrong in checks.items() if wrong]


class RefusedError(EngineError):
    """An engine does not start."""


class Alone:
    """The engine without a pool, and what it answers on a hit on the device."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.blocks: int = engine.memory()["blocks"]
        self.answers: dict[str, Answer] = {}
        self.together: dict[str, Answer] = {}
        """Of requests that are asked together: in one batch, sums may be taken in another order."""

    def learn(self, case: Case) -> None:
        """Has each prompt computed, and asks at once again, so that it is a hit."""
        for saved, asked in zip(case.saved, case.asked, strict=True):
            if asked.id not in self.answers:
                self._engine.forget_device()
                _ask(self._engine, saved)
                (self.answers[asked.id],) = _ask(self._engine, asked)
        if case.name == "preempted" and not self.together:
            self._engine.forget_device()
            for saved in case.saved:
                _ask(self._engine, saved)
            self.together = {one.id: one for one in _ask(self._engine, *case.asked)}

    def resumed(self, saved: Question, asked: Question, so_far: Sequence[int], end: int) -> Answer:
        """The rest of an answer of which ``so_far`` is known, on a hit up to token ``end``."""
        self._engine.forget_device()
        _ask(self._engine, saved)
        if end > len(asked.prompt):  # tokens of the answer keep the KV with which it was decoded
            _ask(self._engine, replace(asked, max_tokens=len(so_far)))
        left = asked.max_tokens - len(so_far)
        prompt = (*asked.prompt, *so_far)
        return _ask(self._engine, replace(asked, prompt=prompt, max_tokens=left))[0]


def cases_of(shape: Shape, tier: str) -> list[Case]:
    """The requests of a shape: prompts that end on a boundary of hits and beside it. A tier has
    continuations of its own: those of another are in the pool by then."""
    unit = max(shape.boundary, 32)
    whole = -(-640 // unit) * unit

    def prompt(seed: str, tokens: int) -> tuple[int, ...]:
        dice = random.Random(f"{shape.name} {seed}")
        return tuple(dice.randrange(1, _LETTERS) for _ in range(tokens))

    def question(name: str, tokens: tuple[int, ...], answer: int = _ANSWER, n: int = 1) -> Question:
        return Question(name, tokens, answer, samples=n)

    on, off = (prompt(f"hit {end}", whole + end) for end in (0, 23))
    hits = (question("on", on), question("off", off))
    base = prompt("chunked", whole + 7)
    tail = prompt(f"tail {tier}", 2 * shape.chunk + 45)
    drawn = prompt("samples", whole + 11)
    short = -(-160 // unit) * unit
    crowd = [question(f"crowd-{i}", prompt(f"crowd {i}", short + 5 + i)) for i in range(4)]
    long = tuple(question(one.id, one.prompt, _LONG_ANSWER) for one in crowd)
    return [
        Case("hit", hits, hits),
        Case("chunked", (question("base", base),), (question(f"tail-{tier}", base + tail),)),
        Case("samples", (question("drawn", drawn),), (question("drawn-3", drawn, n=3),)),
        Case("preempted", tuple(crowd), long),
    ]


class Laboratory:
    """Tries shapes, in any thread. Owns everything in ``folder``. ``say`` gets what is done."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._say = say
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # models are drawn from torch's one generator
        self._numbers = count(1)
        self._running: set[EngineProcess] = set()
        self._stopped = False

    def stop(self) -> None:
        """Kills what runs; what waits for an answer gets EngineError, and nothing more starts."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for engine in running:
            engine.kill()

    def rows(self, shape: Shape, tiers: Sequence[str]) -> Iterator[Row]:
        """The rows of a shape as they come. An engine that fails is a row, the last one."""
        ran = False
        try:
            for row in self._rows(shape, tiers):
                ran = True
                yield row
        except EngineError as error:
            if self._stopped:
                raise
            refused = isinstance(error, RefusedError) and not ran
            yield Row(shape.name, run=not refused, why=reason(str(error)))

    def _rows(self, shape: Shape, tiers: Sequence[str]) -> Iterator[Row]:
        with self._writing:
            model = shape.write(self._folder / "models")
        arguments = shape.arguments(model, self._folder / "cache")
        pool = self._folder / "pools" / shape.name
        below: dict[str, dict[str, Any]] = {
            "disk": {"disk_path": str(pool / "disk"), "disk_size": "1GiB"},
            "remote": {"remote": {"kind": "objects", "url": f"file://{pool / 'remote'}"}},
        }
        lower = [tier for tier in tiers if tier in below]
        settings = dict(_POOL)
        for tier in lower:
            settings |= below[tier]
        cases = {tier: cases_of(shape, tier) for tier in tiers}
        with ExitStack() as stack:
            # The first with the pool: a shape that it refuses needs no other engine.
            with self._engine(shape, {**arguments, "pool": settings}) as first:
                for case in cases[tiers[0]]:
                    for question in case.saved:
                        _ask(first, question)
                alone = Alone(stack.enter_context(self._engine(shape, arguments)))
                for case in chain.from_iterable(cases.values()):
                    alone.learn(case)
                if "host" in tiers:
                    yield from _tier(shape, first, "host", cases["host"], alone)
                _await_writes(pool)
                first.kill()
            for tier in lower:
                with self._engine(shape, {**arguments, "pool": {**_POOL, **below[tier]}}) as engine:
                    _trust(engine, shape, cases[tier][0].saved[0])
                    yield from _tier(shape, engine, tier, cases[tier], alone, restarted=True)

    def ranks_rows(self, shape: Shape) -> Iterator[Row]:
        """What engines of one tensor-parallel rank wrote, engines of two recall, and back. A reply
        after a recall must be that after a hit on the reader's own device: with the KV that another
        number of ranks computed, as its sums round otherwise."""
        with self._writing:
            model = shape.write(self._folder / "models")
        for writers, readers in ((1, 2), (2, 1)):
            pool = self._folder / "pools" / f"{shape.name}-{writers}-{readers}"
            settings = {**_POOL, "disk_path": str(pool / "disk"), "disk_size": "1GiB"}
            arguments = {**shape.arguments(model, self._folder / "cache"), "pool": settings}
            (case, *_) = cases_of(shape, "disk")
            try:
                with self._engine(shape, {**arguments, "tensor_parallel_size": writers}) as one:
                    for question in case.saved:
                        _ask(one, question)
                    _await_writes(pool)
                    one.kill()
                with self._engine(shape, {**arguments, "tensor_parallel_size": readers}) as other:
                    yield _ranks_row(other, shape, case, writers, readers)
            except EngineError as error:
                if self._stopped:
                    raise
                name = f"ranks {writers} to {readers}"
                yield Row(shape.name, "disk", name, run=False, why=reason(str(error)))

    @contextmanager
    def _engine(self, shape: Shape, arguments: Mapping[str, Any]) -> Iterator[EngineProcess]:
        with self._lock:
            if self._stopped:
                raise EngineError(f"{shape.name}: stopped")
            log = self._folder / "logs" / f"{shape.name}-{next(self._numbers)}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            engine = EngineProcess(shape.name, arguments, log, environment=environment())
            self._running.add(engine)
        try:
            self._say(f"{shape.name}: an engine starts")
            try:
                engine.wait_ready()
            except EngineError as error:
                raise RefusedError(str(error)) from error
            self._say(f"{shape.name}: asking")
            yield engine
        finally:
            if engine.is_alive:
                engine.end()
            engine.bury()
            with self._lock:
                self._running.discard(engine)


def _ask(engine: EngineProcess, *questions: Question) -> list[Answer]:
    return engine.answers(questions, _ANSWER_S)


def _trust(engine: EngineProcess, shape: Shape, question: Question) -> None:
    """Asks until a hit is loaded: an engine compares the first hit on another's blocks with what it
    computes."""
    for _ in range(4):
        _ask(engine, question)
        engine.forget_device()
        if _loads(engine.admissions()):
            return
    raise EngineError(f"{shape.name}: nothing is recalled after a restart")


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
        attempts = 0
        while attempts < _ATTEMPTS:
            attempts += 1
            engine.forget_device()
            if case.name == "preempted":
                answers = _ask(engine, *case.asked)
            else:
                answers = [_ask(engine, question)[0] for question in case.asked]
            admissions = engine.admissions()
            loads += _loads(admissions)
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
            deviation=max(map(distance, answers, truth)),
            hit_tokens=sum(one.cached for one in answers),
            device_tokens=sum(one.cached for one in truth),
            bytes_moved=_rise("kvrecall_loaded_bytes_total", before, after),
            bytes_needed=needed_bytes(memory["groups"], loads),
            attempts=attempts,
            preemptions=_rise("vllm:num_preemptions_total", before, after),
            device_blocks=(memory["blocks"], alone.blocks),
        )


def _ranks_row(engine: EngineProcess, shape: Shape, case: Case, writers: int, readers: int) -> Row:
    """One row: every prompt is recalled, then asked for again."""
    trusted = case.saved[0]
    _trust(engine, shape, replace(trusted, prompt=trusted.prompt[: shape.boundary * 2 + 1]))
    memory = engine.memory()
    engine.admissions()
    before = engine.metrics()
    answers, truth = [], []
    for question in case.asked:
        answers += _ask(engine, question)
        truth += _ask(engine, question)
    return Row(
        shape.name,
        "disk",
        f"ranks {writers} to {readers}",
        groups=len(memory["groups"]),
        hybrid_manager=memory["hybrid_manager"],
        restarted=True,
        why=difference(answers, truth),
        equal=not difference(answers, truth),
        deviation=max(map(distance, answers, truth)),
        hit_tokens=sum(one.cached for one in answers),
        device_tokens=sum(one.cached for one in truth),
        bytes_moved=_rise("kvrecall_loaded_bytes_total", before, engine.metrics()),
        bytes_needed=readers * needed_bytes(memory["groups"], _loads(engine.admissions())),
        device_blocks=(memory["blocks"], memory["blocks"]),
    )


def _loads(admissions: Sequence[Admission]) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in admissions if one.end > one.start]


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


def difference(ones: Sequence[Answer], others: Sequence[Answer]) -> str:
    """The first answer whose tokens or log-probabilities are not the same, bit for bit, and from
    where on; empty if there is none."""
    for one, other in zip(ones, others, strict=True):
        if len(one.tokens) != len(other.tokens):
            return f"{one.id}: {len(one.tokens)} tokens, not {len(other.tokens)}"
        pairs = zip(one.tokens, one.scores, other.tokens, other.scores, strict=True)
        for at, (token, score, right, truth) in enumerate(pairs):
            if (token, score) != (right, truth):
                return f"{one.id} from token {at} on"
    return ""


def _rise(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> int:
    return int(after.get(name, 0) - before.get(name, 0))


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
