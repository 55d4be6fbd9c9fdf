"""Vector indexes: what stands in for the exact search over digests, by name."""
