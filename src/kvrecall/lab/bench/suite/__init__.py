"""All benchmarks in one run, and what is published of it."""
