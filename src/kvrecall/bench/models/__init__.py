"""Writes small models in Hugging Face's folder format: random weights, byte-level tokenizer.

They stand in for real models where only the machinery matters: names and shapes are those of
the real architecture, so that vLLM and transformers load them. The weights are scaled so that
greedy output depends on the whole prompt (attention is neither flat nor on one token, and each
block adds as much to the residual stream as it contains), because tests compare outputs. Special
tokens have low logits: greedy output never ends early.
"""

from kvrecall.bench.models.writer import FAMILIES, Family, write_model

__all__ = ["FAMILIES", "Family", "write_model"]
