"""The node service: one pool for all engines of a host, its client, its administration."""
