"""Engines that the laboratory hosts."""
