"""Attacks with bytes: objects, frames, rows and receipts that a stranger wrote."""

from __future__ import annotations
