"""Processes that benchmarks, the demo and gpu-check start: servers, services, ports, progress."""
