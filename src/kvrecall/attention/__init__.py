"""Retrieval attention without an engine: which blocks of a long sequence take part in a step.

The first tokens (init) and the last ones (local) always do; of the blocks between them only those
whose digests are most similar to the current query, chosen anew in every step, layer and KV head.
Torch, no vLLM.
"""
