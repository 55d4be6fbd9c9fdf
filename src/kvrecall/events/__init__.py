"""KV events: which blocks each tier of an engine or a pool service holds, in vLLM's wire format."""
