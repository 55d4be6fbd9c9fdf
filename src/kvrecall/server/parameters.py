"""``parameters`` of a request, which TGI's and MindIE's own forms have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvrecall.engines.base import Sampling
from kvrecall.server.replies import ReplyError

IGNORED_HEADER = "x-kvrecall-ignored"
"""Reply header naming the parameters that were given and have no effect here."""

MAX_NEW_TOKENS = 20
SEED_MAX = 2**63 - 1
_LOWEST_PRIORITY = 5

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=SEED_MAX)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=1024)]
Body = TypeVar("Body", bound=BaseModel)


class Strict(BaseModel):
    """Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Parameters(Strict):
    """What every form knows. null stands for the default everywhere.

    ``typical_p`` and ``watermark`` are accepted and have no effect, as in MindIE; a reply's
    header says so. Of ``priority`` 1 is the highest, 5 the lowest and the default.
    """

    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(gt=0, le=1e6)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    details: bool | None = None
    watermark: bool | None = None
    priority: Annotated[int, Field(ge=1, le=_LOWEST_PRIORITY)] | None = None
    timeout: Annotated[int, Field(ge=1, le=65535)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def samples(self) -> bool:
        """do_sample decides; if it is not given, any sampling value means sampling."""
        if self.do_sample is not None:
            return self.do_sample
        given = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return any(value is not None for value in given)

    @property
    def engine_priority(self) -> int:
        """For the engine, in which less is earlier and requests without a priority have 0."""
        return (self.priority or _LOWEST_PRIORITY) - _LOWEST_PRIORITY

    def ignored(self) -> list[str]:
        """The parameters that were given and have no effect."""
        found = ["typical_p"] if self.typical_p not in (None, 1) else []
        return found + (["watermark"] if self.watermark else [])

    def sampling(self, **more: Any) -> Sampling:
        """How to sample; ``more`` are further fields of Sampling."""
        samples = self.samples
        skip = True if self.skip_special_tokens is None else self.skip_special_tokens
        return Sampling(
            max_tokens=self.max_new_tokens or MAX_NEW_TOKENS,
            temperature=(self.temperature or 1.0) if samples else 0.0,
            top_k=self.top_k if samples else None,
            top_p=self.top_p if samples else None,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=skip,
            **more,
        )


def parsed(form: type[Body], raw: Mapping[str, Any]) -> Body:
    """The request in ``raw``. Raises ReplyError 422 naming the field and what is allowed."""
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        raise ReplyError(422, first_problem(error)) from error


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names what has no effect, if there is something."""
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def first_problem(error: ValidationError) -> str:
    """The first problem of a body, with its field."""
    problem = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    if problem["type"] == "missing":
        return f"{field}: required"
    given = repr(problem["input"])
    message = problem["msg"].removeprefix("Value error, ")
    said = f"{message}, got {given if len(given) <= 80 else given[:80] + '...'}"
    return f"{field}: {said}" if field else said
