"""A router before prefill and decode instances: the prompt to one, the continuation to another."""
