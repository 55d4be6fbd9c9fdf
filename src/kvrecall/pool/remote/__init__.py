"""Stores beyond this host, and the tier that turns any of them into a well-behaved ``Tier``."""
