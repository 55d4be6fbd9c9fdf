"""Pairs of engines on one pool: neither may read KV that it would not have computed."""
