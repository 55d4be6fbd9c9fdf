"""Engines hosted by the laboratory."""
