"""Retrieval attention inside vLLM: subclasses of its attention backends.

Enabled by naming ``retrieval`` in ``VLLM_PLUGINS``; otherwise vLLM is unchanged.
"""
