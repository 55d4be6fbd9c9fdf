"""Common parts of all request forms: validation of bodies, the parameters that TGI's and MindIE's
own form share, and the interface by which routes serve them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvrecall.engines.base import GenerateRequest, Sampling, Update, recalled
from kvrecall.pool.hints import hint_of, shown
from kvrecall.server.replies import ReplyError, Updates

Json = dict[str, Any]

MAX_NEW_TOKENS = 20
_LOWEST_PRIORITY = 5
_PASSED_ON = (
    "top_p repetition_penalty frequency_penalty presence_penalty seed ignore_eos "
    "skip_special_tokens"
).split()

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Positive = Annotated[float, Field(gt=0, le=1e6)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=1024)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]
Body = TypeVar("Body", bound=BaseModel)


class Strict(BaseModel):
    """Unknown fields and wrong types are errors. A single ``stop`` need not be in a list."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("stop", mode="before", check_fields=False)
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class Sampled(Strict):
    """Sampling parameters common to all forms. null means the default."""

    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=1, le=_LOWEST_PRIORITY)] | None = None
    timeout: Annotated[int, Field(ge=1, le=65535)] | None = None

    def sampling(self, **more: Any) -> Sampling:
        """The engine's sampling parameters; ``more``: further fields of Sampling."""
        given = {name: getattr(self, name) for name in _PASSED_ON}
        given |= {
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "include_stop": self.include_stop_str_in_output,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return Sampling(**(given | more))

    def ignored(self) -> list[str]:
        """Given fields without effect."""
        return []


class Parameters(Sampled):
    """``parameters`` of a request in TGI's form and forms derived from it.

    ``typical_p`` and ``watermark`` are accepted and have no effect, as in MindIE; a reply's
    header says so. Of ``priority`` 1 is the highest, 5 the lowest and the default.
    """

    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Positive | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    typical_p: Share | None = None
    details: bool | None = None
    watermark: bool | None = None

    without_effect: ClassVar[tuple[str, ...]] = ("watermark",)

    @property
    def samples(self) -> bool:
        """``do_sample`` if given; otherwise whether any sampling value is given."""
        if self.do_sample is not None:
            return self.do_sample
        given = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return any(value is not None for value in given)

    def ignored(self) -> list[str]:
        found = ["typical_p"] if self.typical_p not in (None, 1) else []
        return found + [name for name in self.without_effect if getattr(self, name)]

    def sampling(self, **more: Any) -> Sampling:
        given: Json = {
            "max_tokens": self.max_new_tokens or MAX_NEW_TOKENS,
            "temperature": (self.temperature or 1.0) if self.samples else 0.0,
            "top_k": self.top_k if self.samples else None,
            "top_p": self.top_p if self.samples else None,
        }
        return super().sampling(**(given | more))


class HintBody(Strict):
    """What the client says about the return of its prompt."""

    returns: bool | None = None
    in_s: float | None = None
    pin_s: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_hint(cls, given: object) -> object:
        hint_of(given)
        return given


class Form(Strict):
    """A request in one form. A route serves it with ``to_request`` and then ``reply``, or, as a
    stream, ``events`` and ``frame``."""

    name: ClassVar[str]  # of the form, in ids of requests

    hint: HintBody | None = None

    @property
    def wanted(self) -> Sampled:
        """The request's parameters."""
        raise NotImplementedError

    def to_request(self, stream: bool) -> GenerateRequest:
        """The request for the engine. Raises ReplyError for what cannot be streamed."""
        raise NotImplementedError

    def reply(self, request: GenerateRequest, updates: Sequence[Update]) -> Json:
        """The reply to a request that is not streamed. ``updates``: the complete output of each
        sequence, the best first."""
        raise NotImplementedError

    def events(self, request: GenerateRequest, updates: Updates) -> AsyncIterator[Json]:
        """The events of a stream, as the updates come."""
        raise NotImplementedError

    @staticmethod
    def frame(value: object) -> str:
        """A JSON value as a server-sent event."""
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

    def _request(
        self, prompt: str | tuple[int, ...], sampling: Sampling, stream: bool, **more: Any
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"{self.name}-{uuid.uuid4().hex}",
            prompt=prompt,
            sampling=sampling,
            stream=stream,
            priority=(self.wanted.priority or _LOWEST_PRIORITY) - _LOWEST_PRIORITY,
            timeout_s=self.wanted.timeout or 0,
            hint=hint_of(dict(self.hint)) if self.hint else None,
            **more,
        )


def counted(update: Update, generated: int) -> Json:
    """``details`` of an answer of ``generated`` tokens so far: their number, and the sources of
    the prompt's. ``prompt_tokens`` and what begins with ``recall`` are kvrecall's additions."""
    return {
        "generated_tokens": generated,
        "prompt_tokens": update.prompt_tokens,
        **recalled(update.split),
    }


def ended(update: Update, generated: int, seed: int | None) -> Json:
    """``details`` of a finished answer."""
    return {"finish_reason": update.finish, **counted(update, generated), "seed": seed}


def parsed(form: type[Body], raw: Mapping[str, Any]) -> Body:
    """The request in ``raw``. Raises ReplyError 422 naming the first wrong field and what is
    allowed."""
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        raise ReplyError(422, f"{field}: unknown field")
    if problem["type"] == "missing":
        raise ReplyError(422, f"{field}: required")
    message = problem["msg"].removeprefix("Value error, ")
    said = f"{message}, got {shown(problem['input'])}"
    raise ReplyError(422, f"{field}: {said}" if field else said)


@cache
def described(*forms: type[BaseModel]) -> Json:
    """``openapi_extra`` of a route whose body has one of these forms."""
    schemas = [_inlined(form.model_json_schema()) for form in forms]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Json) -> Json:
    """``schema`` without ``$defs``: each reference is replaced by its target, because in
    an OpenAPI document references resolve against the whole document."""
    definitions = schema.get("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolved(definitions[part["$ref"].rsplit("/", 1)[1]])
        return {key: resolved(value) for key, value in part.items() if key != "$defs"}

    found: Json = resolved(schema)
    return found
