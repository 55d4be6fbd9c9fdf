"""Retrieval attention inside vLLM: a subclass of its CPU attention backend.

Switched on by naming ``retrieval`` in ``VLLM_PLUGINS``; otherwise vLLM is left untouched.
"""
