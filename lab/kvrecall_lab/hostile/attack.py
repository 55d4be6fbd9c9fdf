"""An attack, and how it ends.

An attack is a function that takes an empty folder, starts the real part, attacks it as the stranger
it plays could, and returns in a few words what stopped it. It raises what it achieved instead:
``GotIn``, ``SecretSeen``, ``Crashed`` or ``Stalled``. The runner gives each a process of its own,
so that a death by a signal is a crash and a time limit is a stall.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class Breach(Exception):
    """What an attack achieved. ``key`` counts it in the verdict."""

    key = ""


class GotIn(Breach):
    """Bytes, an action or room were had without the right to them."""

    key = "got_in"


class SecretSeen(Breach):
    """A secret was printed, logged or sent."""

    key = "secrets_seen"


class Crashed(Breach):
    """A process of ours ended, or a tier disabled itself."""

    key = "crashes"


class Stalled(Breach):
    """Somebody else's request waited for what the attacker did."""

    key = "stalls"


class NotHere(Exception):
    """This machine lacks what the attack needs; the text names it."""


BREACHES: tuple[type[Breach], ...] = (GotIn, SecretSeen, Crashed, Stalled)


@dataclass(frozen=True, slots=True)
class Attack:
    """``name`` is ``area.what``; ``about`` says what the attacker tries, as its docstring does."""

    name: str
    about: str
    run: Callable[[Path], str]
    needs_engine: bool
    limit_s: float


_attacks: dict[str, Attack] = {}


def attack(
    *, engine: bool = False, limit_s: float = 60.0
) -> Callable[[Callable[[Path], str]], Callable[[Path], str]]:
    """Registers a function as an attack called ``module.function-name``. ``engine``: it starts a
    vLLM engine. ``limit_s``: after this it counts as a stall."""

    def register(run: Callable[[Path], str]) -> Callable[[Path], str]:
        area = run.__module__.rpartition(".")[2]
        name = f"{area}.{run.__name__.replace('_', '-')}"
        about = " ".join((run.__doc__ or "").split())
        _attacks[name] = Attack(name, about, run, engine, limit_s)
        return run

    return register


def attacks() -> list[Attack]:
    """All attacks of this package's modules, by name."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return [_attacks[name] for name in sorted(_attacks)]
