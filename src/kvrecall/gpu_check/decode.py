"""What a decoded token takes in whole servers, dense and by retrieval."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from kvrecall.bench.model import BLOCK, BenchModel, Texts
from kvrecall.errors import EngineError
from kvrecall.gpu_check import CheckError, Finding, Say
from kvrecall.gpu_check.servers import blocks_of, environment_of, own_options
from kvrecall.processes.child import end_all
from kvrecall.processes.server import ServerProcess

Case = tuple[int, int]
"""Sequences at once, and tokens of each."""

POOL = ("--host-size", "1GiB")
"""Small, as nothing is recalled."""

_SETTLED_S = 0.5
"""After which no answer has tokens left that came while others began."""
_TIMED = 256
_ANSWER = 4096
"""Tokens that an answer may have; it is ended before."""


def measure_decode(
    cases: Sequence[Case],
    shape: BenchModel,
    device: str,
    folder: Path,
    say: Say,
    settings: Mapping[str, str],
    pool: Sequence[str] = POOL,
    more: Sequence[str] = (),
) -> Finding:
    """Milliseconds between the tokens of each of as many answers at once as a case has sequences,
    in two servers, one after the other; then tokens a second by retrieval over dense ones.
    ``settings``: of retrieval. ``pool``: options of the pool; ``more``: of vLLM. The weights are
    random and generated in place, the same for both. Raises CheckError if retrieval did not act, or
    did where it should not."""
    longest = max(tokens for _, tokens in cases) + _ANSWER
    path = shape.write(folder / "model", longest + BLOCK, "llama", weights=False)
    found: dict[str, dict[str, float]] = {}
    for name in ("retrieval", "dense"):
        sparse = name == "retrieval"
        say(f"{name}: starting")
        words = decode_options(path, cases, shape, device, sparse, pool, more)
        environment = environment_of(settings if sparse else {})
        found[name] = {}
        with ServerProcess(words, folder / f"{name}.log", say, environment) as server:
            for count, tokens in cases:
                case = f"{count} of {tokens}"
                prompts = [Texts(tokens + at).tokens(tokens) for at in range(count)]
                for prompt in prompts:
                    list(server.tokens(prompt, 8))  # the prompt is computed, kernels are compiled
                server.settle()
                before = blocks_of(server)[1]
                each = [1e3 * seconds for seconds in paces(server, prompts)]
                found[name][case] = round(median(each), 4)
                say(f"{name}, {case} tokens: {found[name][case]} ms a token", ms=each)
                if (blocks_of(server)[1] > before) != sparse:
                    acted = "did not act" if sparse else "acted"
                    raise CheckError(f"{name}, {case} tokens: retrieval {acted}")
            end_all(server.family(), 0.0)  # it has nothing to keep
    ratios = {case: round(ms / found["retrieval"][case], 3) for case, ms in found["dense"].items()}
    return f"tokens a second over dense: {ratios}", {"ms": found, "times_dense": ratios}


def decode_options(
    path: Path,
    cases: Sequence[Case],
    shape: BenchModel,
    device: str,
    sparse: bool,
    pool: Sequence[str] = POOL,
    more: Sequence[str] = (),
) -> list[str]:
    """Options of ``kvrecall serve``. The device's cache has room for the sequences, and digests.
    FlashAttention is the backend that retrieval replaces on a GPU, whatever vLLM would choose."""
    longest = max(tokens for _, tokens in cases) + _ANSWER
    room = int(1.1 * max(count * (tokens + _ANSWER) for count, tokens in cases))
    words = [str(path), "--max-model-len", str(longest), "--block-size", str(BLOCK)]
    words += ["--kv-cache-memory-bytes", str(room * shape.token_bytes), *pool]
    words += ["--retrieval"] if sparse else []
    return [*words, *own_options(device), "--enable-scale-out", *more]


def paces(server: ServerProcess, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Mean seconds between the tokens of each answer, while all are answered. Raises EngineError
    if one ended, or did not come."""
    begun = threading.Barrier(len(prompts))

    def read(prompt: Sequence[int]) -> float:
        start, tokens = 0.0, 0
        try:
            for count in server.tokens(prompt, _ANSWER):
                now = time.perf_counter()
                if not start:
                    begun.wait()
                    start = time.perf_counter() + _SETTLED_S
                elif tokens:
                    tokens += count
                    if tokens > _TIMED:
                        return (now - start) / (tokens - 1)
                elif now >= start:
                    start, tokens = now, 1
            raise EngineError(f"an answer ended after {tokens} of {_TIMED} tokens that were timed")
        except BaseException:
            begun.abort()  # the others do not wait for it
            raise

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(read, prompt) for prompt in prompts]
    errors = [error for one in answers if (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return [one.result() for one in answers]
