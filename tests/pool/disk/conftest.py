from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disks import OPENED, open_disk

from pool.disk.indexes import KEYS


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tier that has stored ``KEYS`` and was closed."""
    folder = tmp_path_factory.mktemp("stored")
    bench = open_disk(folder, 16 << 20)
    bench.put(KEYS)
    bench.tier.close()
    return folder


@pytest.fixture(autouse=True)
def closes_tiers() -> Iterator[None]:
    """Closes what ``open_disk`` opened in a test."""
    yield
    while OPENED:
        OPENED.pop().tier.close()
