"""Pairs of engines on one pool: neither may ever read KV that it would not have computed."""
