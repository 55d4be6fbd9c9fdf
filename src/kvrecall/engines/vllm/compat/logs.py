"""The pool's log lines, in vLLM's log."""

from __future__ import annotations

import logging


def show_pool_lines() -> None:
    """Sends the lines of kvrecall's own loggers where vLLM's go, from its level on. vLLM configures
    only the logger ``vllm``, and without a handler Python shows warnings alone. No effect where a
    handler takes these lines already, or vLLM has none (``VLLM_CONFIGURE_LOGGING=0``)."""
    ours, theirs = logging.getLogger("kvrecall"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
