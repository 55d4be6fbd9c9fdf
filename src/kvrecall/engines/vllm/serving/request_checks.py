"""Refuses what vLLM's own checks let through and what then breaks more than the request itself.

Found by sending such requests to a live server (docs/log.md, 2026-11-21): vLLM 0.32 validates a
JSON schema that xgrammar does not take by building llguidance's grammar of it, within the API
server and with memory in proportion to ``minItems`` and ``maxItems``: one request could have the
whole server killed. The others cost only their own request, an internal error without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

MOST_ITEMS = 100_000
"""Bound of all ``minItems`` and ``maxItems`` of a request together; about 125 MB of grammar."""

_COUNTS = ("minItems", "maxItems")
_COUNT_IN_TEXT = re.compile(r'"m(?:in|ax)Items"\s*:\s*([-+.\deE]+)')
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


def check(params: SamplingParams) -> None:
    """Raises VLLMValidationError (400) naming the parameter that cannot be served."""
    for name in ("stop", "bad_words"):
        if any(not _is_text(word) for word in getattr(params, name) or ()):
            raise VLLMValidationError(f"{name} holds text that is not Unicode", parameter=name)
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, Mapping):
        raise VLLMValidationError(
            "kv_transfer_params must be an object", parameter="kv_transfer_params"
        )
    if params.structured_outputs is not None:
        _check_items(params.structured_outputs)


def check_output(output: RequestOutput, params: SamplingParams) -> None:
    """Raises VLLMValidationError where the engine gave a request up because of its structured
    output; vLLM would tell of an internal error."""
    if params.structured_outputs is None:
        return
    if any(each.finish_reason == "error" for each in output.outputs):
        raise VLLMValidationError(
            "the engine cannot follow this structured output: its grammar does not compile, or "
            "none of the tokens that are allowed fits it",
            parameter="structured_outputs",
        )


def _check_items(wanted: StructuredOutputsParams) -> None:
    total = 0.0
    for count in _counts(wanted):
        total += max(count, 0)
        if total > MOST_ITEMS:
            raise VLLMValidationError(
                f"the arrays of a schema may have {MOST_ITEMS} items together "
                "(minItems, maxItems); leave out a bound that bounds nothing",
                parameter="structured_outputs",
            )


def _counts(wanted: StructuredOutputsParams) -> Iterator[float]:
    """All bounds on items in a request's schemas, wherever they may stand."""
    for source in (wanted.json, wanted.structural_tag):
        if isinstance(source, str):
            try:
                yield from _walk(json.loads(source))
            except (ValueError, RecursionError):
                continue  # vLLM refuses it
        else:
            yield from _walk(source)
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), wanted.grammar or "")
    for found in _COUNT_IN_TEXT.findall(text):
        try:
            yield float(found)
        except ValueError:
            continue


def _walk(source: object) -> Iterator[float]:
    pending = [source]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            yield from (float(part[key]) for key in _COUNTS if _is_number(part.get(key)))
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
