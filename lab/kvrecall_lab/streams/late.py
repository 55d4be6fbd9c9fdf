"""Devices whose copies are made as late as may be."""

from __future__ import annotations

import random

from .device import LateDevice, Machine, Style

PATIENCE = 3


def late_device(_: object = None) -> LateDevice:
    """Copies are made when they are waited for, or when they were asked for ``PATIENCE`` times."""
    style = Style(eager=0.0, patience=PATIENCE - 1, only_needed=True, speeds=(1.0,))
    return LateDevice(Machine(random.Random(0), style))
