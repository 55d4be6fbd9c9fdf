"""kvrecall: keeps KV-cache blocks in a pool of tiers and recalls them instead of recomputing."""

__version__ = "0.1.0"
