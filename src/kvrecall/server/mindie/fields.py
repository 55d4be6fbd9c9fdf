"""How a field of config.json is declared: its default, its bounds and what it does here."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Effect(StrEnum):
    """What a field does in kvrecall."""

    ACTS = "acts"
    PARTLY = "partly"  # some values act, others are refused or without effect
    NONE = "without effect"
    RETIRED = "retired"


class Section(BaseModel):
    """A section of config.json. Types are strict, unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


def acts(text: str, default: Any = ..., **bounds: Any) -> Any:
    """A field that does what ``text`` says. Without a default it is required."""
    return _field(Effect.ACTS, text, default, bounds)


def partly(text: str, default: Any = ..., **bounds: Any) -> Any:
    """A field of which only some values act; ``text`` says which."""
    return _field(Effect.PARTLY, text, default, bounds)


def idle(why: str, default: Any = None, **bounds: Any) -> Any:
    """A field that is accepted and has no effect, because of ``why``."""
    return _field(Effect.NONE, why, default, bounds)


def retired(text: str) -> Any:
    """A field that has gone; it is accepted with a warning."""
    return _field(Effect.RETIRED, text, None, {})


def effect_of(field: FieldInfo) -> Effect:
    """What was declared of ``field``; sections, which are not declared, act."""
    extra = field.json_schema_extra
    return Effect(str(extra["effect"])) if isinstance(extra, dict) else Effect.ACTS


def _field(effect: Effect, text: str, default: Any, bounds: dict[str, Any]) -> Any:
    return Field(default, description=text, json_schema_extra={"effect": effect.value}, **bounds)


Names = Annotated[list[str], Field(max_length=64)]
Path = Annotated[str, Field(max_length=4096)]
Port = Annotated[int, Field(ge=1024, le=65535)]
