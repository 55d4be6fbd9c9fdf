"""``best_of`` over what vLLM has: more sequences than wanted, of which the most probable are given.

What is asked travels in the sampling parameters' ``extra_args``, so that every route that ends in
the engine's ``generate`` serves it. Sequences are ranked by their cumulative log probability, as
vLLM did when it had the parameter.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

KEY = "kvrecall_best_of"

_GREEDY = 1e-5  # vLLM's own bound of temperatures it takes for 0


def asked(params: SamplingParams) -> int | None:
    """How many sequences are to be computed; None if as many as are wanted."""
    value = (getattr(params, "extra_args", None) or {}).get(KEY)
    return value if isinstance(value, int) else None


def widened(params: SamplingParams, best_of: int) -> SamplingParams:
    """``params`` for ``best_of`` sequences, whose probabilities are told at the end.

    Raises VLLMValidationError for what cannot be ranked.
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
    """``output`` with its best ``params.n`` sequences, the best first and numbered anew."""
    best = sorted(output.outputs, key=_score, reverse=True)[: params.n]
    for index, sequence in enumerate(best):
        sequence.index = index
        if params.logprobs is None:
            sequence.logprobs = None
    output.outputs = best
    return output


def _score(sequence: Any) -> float:
    value = sequence.cumulative_logprob
    return float("-inf") if value is None else float(value)


def _invalid(message: str, value: int) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="best_of", value=value)
