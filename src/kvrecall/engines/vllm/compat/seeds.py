"""Requests with a ``seed`` on a CPU.

In a prefill of several steps vLLM 0.32 samples at the end of each and takes that back by the offset
of the request's random generator. Generators of a CPU have no offset: the first such request ends
the engine, and with it all others.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

SWITCH = "KVRECALL_SEEDS"
"""``1``: also in engines without this project's connector."""


def register() -> None:
    """The ``vllm.general_plugins`` entry point: installs in workers, if it was asked for."""
    is_worker = "Worker" in multiprocessing.current_process().name
    if is_worker and os.environ.get(SWITCH) == "1":
        install()


def ask(environ: MutableMapping[str, str]) -> None:
    """Asks for it in processes yet to be started, if nothing was asked for."""
    environ.setdefault(SWITCH, "1")


def install() -> None:
    """Has this process's model runner take samples back as a CPU can. Nothing elsewhere.
    Idempotent."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's is one; large

    own = getattr(GPUModelRunner, "_bookkeeping_sync", None)
    if own is not None and own.__module__ != __name__:
        GPUModelRunner._bookkeeping_sync = _without_offsets(own)


def _without_offsets(own: Callable[..., Any]) -> Callable[..., Any]:
    """``own``, which does not see the generators of requests that are still being prefilled.

    Before its first token a request's generator begins anew, so that tokens do not depend on how
    the prefill was cut. One that was preempted has drawn before: its generator goes on.
    """

    def bookkeeping(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        prefilling = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        held = {at: batch.generators.pop(at) for at in prefilling if at in batch.generators}
        for at, generator in held.items():
            if not runner.requests[batch.req_ids[at]].output_token_ids:
                generator.manual_seed(generator.initial_seed())
        try:
            return own(runner, *args, **kwargs)
        finally:
            batch.generators.update(held)

    return bookkeeping
