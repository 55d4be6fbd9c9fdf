"""The pool: tiers of memory that keep KV-cache blocks. No torch, no vLLM."""

from kvrecall.pool.pool import Pool

__all__ = ["Pool"]
