"""Retrieval attention without an engine: selects the blocks of a long sequence for a step.

A step always attends to the first tokens (init) and the last ones (local). Of the blocks between
them it attends only to those whose digests are most similar to the current query, selected anew in
every step, layer and KV head. Torch, no vLLM.
"""

from __future__ import annotations

from collections.abc import Collection

PREFIX = "VLLM_RETRIEVAL_"
"""Of the variables that set it."""


def layers_refusal(kinds: Collection[str]) -> tuple[str, str] | None:
    """Why retrieval attention cannot serve a model whose layers are of these ``kinds`` (those of
    ``CacheKind``, and others by their names), and the cure; None if it can. Empty: not known."""
    others = sorted(set(kinds) - {"full", "window"})
    if others:
        cure = "serve a model with full attention or sliding windows in every layer"
        return f"layers of kind {' and '.join(others)}", cure
    if kinds and "full" not in kinds:
        return "sliding windows in every layer", "serve a model with full attention"
    return None
