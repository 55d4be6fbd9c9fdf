"""Retrieval attention without an engine: selects the blocks of a long sequence for a step.

A step always attends to the first tokens (init) and the last ones (local). Of the blocks between
them it attends only to those whose digests are most similar to the current query, selected anew in
every step, layer and KV head. Torch, no vLLM.
"""
