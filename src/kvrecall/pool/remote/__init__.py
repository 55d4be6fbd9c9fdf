"""Stores beyond this host, and the tier that makes a well-behaved ``Tier`` of any of them."""
