"""Benchmarks for maintainers, and what publishes the figures of all of them."""
