"""Mooncake Store as a store of the remote tier. Its client runs in its own process."""
