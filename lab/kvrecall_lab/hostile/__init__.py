"""Attacks on everything that listens, reads or prints, each run against the real part."""
