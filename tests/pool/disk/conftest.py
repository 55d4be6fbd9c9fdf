from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.disks import OPENED


@pytest.fixture(autouse=True)
def closes_tiers() -> Iterator[None]:
    """Closes what ``open_disk`` opened in a test."""
    yield
    while OPENED:
        OPENED.pop().tier.close()
