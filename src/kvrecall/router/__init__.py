"""A router in front of prefill and decode instances."""
