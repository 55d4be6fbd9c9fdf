"""What engines of one number of tensor-parallel ranks write and engines of another recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrecall_lab.engines.engine import EngineProcess, Question
from kvrecall_lab.engines.kv import Kv
from kvrecall_lab.identity.trial import distance
from kvrecall_lab.shapes.cases import ask, loads_of, rise, trust
from kvrecall_lab.shapes.row import Row, difference, from_tier, needed_bytes
from kvrecall_lab.shapes.shapes import Shape


@dataclass(frozen=True, slots=True)
class Saved:
    """A prompt that is in the pool, and the KV that its writer computed."""

    question: Question
    kv: Kv


def saved_by(engine: EngineProcess, questions: Sequence[Question]) -> list[Saved]:
    """Has prompts computed and saved."""
    found = []
    for question in questions:
        ask(engine, replace(question, max_tokens=1))
        found.append(Saved(question, engine.device_kv()))
    return found


def recalled(
    engine: EngineProcess,
    shape: Shape,
    written: Sequence[Saved],
    tier: str,
    ranks: tuple[int, int],
    restarted: bool = False,
) -> Row:
    """Recalls every prompt. ``ranks``: of the writers and of the readers. The device must then have
    the bytes that the writer had, and a reply must be that after a hit on the reader's own device:
    with the KV that another number of ranks computed, as its sums round otherwise."""
    trust(engine, shape, written[-1].question)  # a prefix of it may have blocks of other writers
    memory = engine.memory()
    before = engine.metrics()
    loads: list[tuple[int, int]] = []
    came, answers, truth, wrong = [], [], [], []
    for one in written:
        engine.forget_device()
        came += ask(engine, replace(one.question, max_tokens=1))
        kv = engine.device_kv()
        first = loads_of(engine.admissions())
        wrong += [unequal(one, kv, end) for _, end in first]
        engine.forget_device()
        answers += ask(engine, one.question)
        again = loads_of(engine.admissions())
        truth += ask(engine, one.question)
        if loads_of(engine.admissions()) or not first or not again:
            wrong.append(f"{one.question.id}: not recalled twice, then found on the device")
        loads += first + again
    after = engine.metrics()
    why = next(filter(None, [*wrong, difference(answers, truth)]), "")
    return Row(
        shape.name,
        tier,
        case_of(ranks),
        groups=len(memory["groups"]),
        hybrid_manager=memory["hybrid_manager"],
        restarted=restarted,
        why=why,
        equal=not why,
        deviation=max(map(distance, answers, truth)),
        hit_tokens=sum(one.cached for one in answers),
        tier_tokens=from_tier(came, tier),
        device_tokens=sum(one.cached for one in truth),
        bytes_moved=rise("kvrecall_loaded_bytes_total", before, after),
        bytes_needed=ranks[1] * needed_bytes(memory["groups"], loads),
        device_blocks=(memory["blocks"], memory["blocks"]),
    )


def case_of(ranks: tuple[int, int]) -> str:
    """The case's name; ``ranks`` as of ``recalled``."""
    return "ranks {} to {}".format(*ranks)


def unequal(written: Saved, kv: Kv, end: int) -> str:
    """The first block up to token ``end`` that is not the writer's, head for head; empty if there
    is none."""
    for layer, blocks in kv.items():
        ours = {at: heads for at, heads in blocks.items() if at <= end}
        theirs = written.kv.get(layer, {})
        for at, heads in ours.items():
            if theirs.get(at) != heads:
                return f"{written.question.id}: KV of {layer} before token {at} is not the writer's"
        if not ours:
            return f"{written.question.id}: no KV of {layer}"
    return "" if kv.keys() == written.kv.keys() else f"{written.question.id}: other layers"
