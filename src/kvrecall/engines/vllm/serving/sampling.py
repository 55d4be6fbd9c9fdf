"""Sampling parameters beyond vLLM's: ``best_of``, and checks that vLLM lacks.

``best_of``: the engine computes more sequences than requested and returns the most probable by
cumulative log probability, as vLLM did when it had the parameter. It travels in ``extra_args``, so
that every route that ends in the engine's ``generate`` supports it.

The checks refuse requests that break more than themselves, found by sending such requests to a
live server (archive/log.md): for a JSON schema that xgrammar does not support, vLLM 0.32
validates by building llguidance's grammar, within the API server and with memory in proportion to
``minItems`` and ``maxItems``; one request could have the whole server killed. The others cost only
their own request, an internal error without a message.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from kvrecall.engines.base import LONGEST_ID

BEST_OF = "kvrecall_best_of"
"""Key of ``best_of`` in ``extra_args``."""

MOST_ITEMS = 100_000
"""Bound of all ``minItems`` and ``maxItems`` of a request together; about 125 MB of grammar."""

_GREEDY = 1e-5  # vLLM's own bound of temperatures it takes for 0
_COUNTS = ("minItems", "maxItems")
_COUNT_IN_TEXT = re.compile(r'"m(?:in|ax)Items"\s*:\s*([-+.\deE]+)')
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


def requested_best_of(params: SamplingParams) -> int | None:
    """Number of sequences to compute; None if it equals the number to return."""
    value = (getattr(params, "extra_args", None) or {}).get(BEST_OF)
    return value if isinstance(value, int) else None


def widened(params: SamplingParams, best_of: int) -> SamplingParams:
    """``params`` for ``best_of`` sequences, whose probabilities are returned at the end.

    Raises VLLMValidationError for parameters that cannot be ranked.
    """
    if best_of < params.n:
        raise _invalid(f"best_of is {best_of}, less than n, which is {params.n}", best_of)
    if params.temperature < _GREEDY and best_of > 1:
        raise _invalid("best_of must be 1 when sampling greedily (temperature 0)", best_of)
    if params.output_kind == RequestOutputKind.DELTA:
        raise _invalid("best_of cannot be streamed; leave out stream or best_of", best_of)
    wide = params.clone()
    wide.n = best_of
    wide.output_kind = RequestOutputKind.FINAL_ONLY
    wide.logprobs = 0 if params.logprobs is None else params.logprobs
    return wide


def ranked(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """``output`` with its best ``params.n`` sequences, the best first and renumbered."""

    def score(sequence: Any) -> float:
        value = sequence.cumulative_logprob
        return float("-inf") if value is None else float(value)

    best = sorted(output.outputs, key=score, reverse=True)[: params.n]
    for index, sequence in enumerate(best):
        sequence.index = index
        if params.logprobs is None:
            sequence.logprobs = None
    output.outputs = best
    return output


def _invalid(message: str, value: int) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="best_of", value=value)


def long_id(request_id: str) -> str:
    """An error: a request's id is too long."""
    allowed = f"allowed: {LONGEST_ID}, also in X-Request-Id"
    return f"request_id: {len(request_id)} characters; {allowed}"


MOST_DEPTH = 200
"""Levels of lists and objects in a parameter: Python cannot pickle a thousand."""


def check(params: SamplingParams) -> None:
    """Raises VLLMValidationError (400) naming the parameter that cannot be served."""
    for name in ("stop", "bad_words"):
        if any(not _is_text(word) for word in getattr(params, name) or ()):
            raise VLLMValidationError(f"{name} holds text that is not Unicode", parameter=name)
    extra, name = params.extra_args or {}, "kv_transfer_params"
    if not isinstance(extra.get(name), Mapping | None):
        raise VLLMValidationError(f"{name} must be an object", parameter=name)
    for name, value in extra.items():
        _check_depth(name, value)
    if params.structured_outputs is not None:
        _check_depth("structured_outputs", params.structured_outputs.json)
        _check_items(params.structured_outputs)


def _check_depth(name: str, value: object) -> None:
    """The engine pickles parameters for its workers; what it cannot pickle ends it."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        holders = [one for one in level if isinstance(one, Mapping | list | tuple)]
        parts = [one.values() if isinstance(one, Mapping) else one for one in holders]
        if not (level := [inner for part in parts for inner in part]):
            return
    message = f"{name} is nested deeper than {MOST_DEPTH} levels"
    raise VLLMValidationError(message, parameter=name)


def check_output(output: RequestOutput, params: SamplingParams) -> None:
    """Raises VLLMValidationError if the engine abandoned a request because of its structured
    output; vLLM would report an internal error."""
    if params.structured_outputs is None:
        return
    if any(each.finish_reason == "error" for each in output.outputs):
        raise VLLMValidationError(
            "the engine cannot follow this structured output: its grammar does not "
            "compile, or no allowed token fits it",
            parameter="structured_outputs",
        )


def _check_items(wanted: StructuredOutputsParams) -> None:
    if sum(count for count in _counts(wanted) if count > 0) > MOST_ITEMS:
        raise VLLMValidationError(
            f"the arrays of a schema may have {MOST_ITEMS} items together (minItems, "
            "maxItems); omit bounds that limit nothing",
            parameter="structured_outputs",
        )


def _counts(wanted: StructuredOutputsParams) -> Iterator[float]:
    """All bounds on items in a request's schemas, wherever they may stand."""
    for source in (wanted.json, wanted.structural_tag):
        with contextlib.suppress(ValueError, RecursionError):  # then vLLM refuses it
            yield from _walk(json.loads(source) if isinstance(source, str) else source)
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), wanted.grammar or "")
    for found in _COUNT_IN_TEXT.findall(text):
        with contextlib.suppress(ValueError):
            yield float(found)


def _walk(source: object) -> Iterator[float]:
    pending = [source]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            for count in (part.get(key) for key in _COUNTS):
                if isinstance(count, int | float) and not isinstance(count, bool):
                    yield float(count)
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
