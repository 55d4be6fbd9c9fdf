"""Runs the engines of the pairs, one after the other, and records their answers.

``python -m kvrecall_lab.identity.engines`` is an engine process like ``kvrecall_lab.engines.host``
for the blind pairs: every engine has one and the same namespace, and every adapter the same
content, so that only the audit separates them.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvrecall.block import Namespace
from kvrecall_lab.engines import host
from kvrecall_lab.engines.engine import HOST, Answer, EngineProcess, Engines, Question
from kvrecall_lab.identity.setups import ANSWER_TOKENS, KNOWN, PAST, Prompts, Setup
from kvrecall_lab.models.variants import write_over

_POOL = {
    "host_size": "256MiB",
    "disk_size": "1GiB",
    "async_write": False,  # the blocks of an answered request are on disk
    "load_or_compute": "load",
}

_CHANGE_S = 120.0
_RUNNING_TOKENS = 64

_POOL_TIERS = ("host", "disk", "remote")

_BLIND_HOST = "kvrecall_lab.identity.engines"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to the prompt ``name``. ``own``: leading prompt tokens that this engine had
    computed or requested before, in this life or an earlier one."""

    name: str
    answer: Answer
    own: int

    @property
    def recalled(self) -> int:
        """Prompt tokens from the pool."""
        return sum(self.answer.sources.get(tier, 0) for tier in _POOL_TIERS)

    @property
    def foreign(self) -> int:
        """Prompt tokens from the pool that another engine must have saved."""
        return max(0, self.recalled - self.own)


@dataclass(slots=True)
class Life:
    """An engine from start to end. ``prompts``: prompts of its earlier lives and of this one.

    ``audits`` and ``caught``: audits, and failed ones, by its counters at the end; ``logged``:
    whether its log reports a failed one.
    """

    replies: list[Reply] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    audits: int = 0
    caught: int = 0
    logged: bool = False

    @property
    def foreign(self) -> int:
        """Prompt tokens from the pool that another engine must have saved."""
        return sum(reply.foreign for reply in self.replies)


class Lives:
    """Runs engines of setups, in any thread. Owns everything in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self.engines = Engines(folder)

    def live(
        self,
        label: str,
        setup: Setup,
        prompts: Prompts,
        plan: Sequence[str],
        pool: Path,
        blind: bool = False,
        before: Sequence[str] = (),
    ) -> Life:
        """Starts an engine on the pool's folder, sends the prompts of ``plan`` one by one, with the
        device's cache emptied each time, and ends it. ``before``: prompts of its earlier lives.
        Raises EngineError."""
        life = Life(prompts=list(before))
        with self._engine(label, setup, pool, blind) as engine:
            for change in setup.changes:
                if _is_first_load(setup, change) or "place" in change:
                    _change(engine, change)
                    continue
                for name in PAST:  # of other weights: on the device, and in the pool
                    _ask(engine, setup, prompts, name)
                running = None if "sleep" in change else _long(setup, prompts)  # sleep waits
                _change(engine, change, running)
            for name in plan:
                own = prompts.shared_tokens(name, life.prompts, setup.block_size)
                engine.forget_device()
                life.replies.append(Reply(name, _ask(engine, setup, prompts, name), own))
                life.prompts.append(name)
            counters = engine.metrics()
            life.audits = int(counters.get("kvrecall_audits_total", 0))
            life.caught = int(counters.get("kvrecall_audits_failed_total", 0))
            life.logged = _log_has_failed_audit(engine.log)
        return life

    def alone(self, label: str, setup: Setup, prompts: Prompts) -> tuple[list[Reply], list[Reply]]:
        """Answers of the engine without a pool: to every prompt computed whole, and continued from
        the engine's own device cache. Raises EngineError."""
        computed, continued = [], []
        with self._engine(label, setup) as engine:
            for change in setup.changes:
                _change(engine, change, _long(setup, prompts) if "call" in change else None)
            for name in prompts.texts:
                engine.forget_device()
                computed.append(Reply(name, _ask(engine, setup, prompts, name), 0))
                continued.append(Reply(name, _ask(engine, setup, prompts, name), 0))
        return computed, continued

    @contextmanager
    def _engine(
        self, label: str, setup: Setup, pool: Path | None = None, blind: bool = False
    ) -> Iterator[EngineProcess]:
        arguments = setup.arguments(self._folder / "cache")
        if pool is not None:
            arguments["pool"] = {**_POOL, "disk_path": str(pool)}
        with ExitStack() as stack:
            for place in sorted(setup.places):
                stack.enter_context(self._places[place])
            setup.prepare()
            module = _BLIND_HOST if blind else HOST
            yield stack.enter_context(self.engines.running(label, arguments, module=module))


def _question(setup: Setup, prompts: Prompts, name: str) -> Question:
    text = prompts.texts[name]
    more: dict[str, Any] = {"adapter": setup.adapter, "images": setup.images}
    return Question(name, text, ANSWER_TOKENS, embeds=setup.embeds(len(text)), **more)


def _long(setup: Setup, prompts: Prompts) -> Question:
    """One that runs for many steps."""
    return replace(_question(setup, prompts, KNOWN[0]), max_tokens=_RUNNING_TOKENS)


def _ask(engine: EngineProcess, setup: Setup, prompts: Prompts, name: str) -> Answer:
    (answer,) = engine.answers([_question(setup, prompts, name)])
    return answer


def _is_first_load(setup: Setup, change: Mapping[str, Any]) -> bool:
    """Whether this loads an adapter before any request has it loaded."""
    return "adapter" in change and change is setup.changes[0]


def _change(
    engine: EngineProcess, change: Mapping[str, Any], running: Question | None = None
) -> None:
    """Changes a running engine's weights, or files, while it answers ``running``."""
    if "place" in change:
        write_over(change["place"], change["source"])
        return
    if running is not None:
        engine.ask(running, logprobs=True)
    engine.send({"do": "change", **change})
    awaited = {"change"} if running is None else {"change", "tokens"}
    until = time.monotonic() + _CHANGE_S
    while awaited:
        awaited -= engine.next_line(until).keys()


def _log_has_failed_audit(log: Path) -> bool:
    lines = log.read_text(errors="replace").lower().splitlines()
    return any("kvrecall" in line and "audit failed" in line for line in lines)


# -- in the process of a blind engine ---------------------------------------------------------


def _blind() -> None:
    """Makes the connector in this process unable to distinguish engines and adapters."""
    connector: Any = importlib.import_module("kvrecall.engines.vllm.connector.connector")
    one = Namespace.of({"engine": "any, in the laboratory"})
    connector.namespace_of = lambda *_, **__: one
    connector.Adapters = _AnyAdapters


class _AnyAdapters:
    """Replaces ``kvrecall.engines.vllm.identity.namespace.Adapters``."""

    def __init__(self, *_: Any) -> None:
        pass

    def loaded(self, _: Any) -> None: ...

    def is_known(self, _: Any) -> bool:
        return True

    def identity(self, _: Any) -> str:
        return "any"


if __name__ == "__main__":
    host.main(before_engine=_blind)
