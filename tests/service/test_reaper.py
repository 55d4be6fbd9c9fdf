"""The reaper's loop."""

from __future__ import annotations

import asyncio

import pytest

from kvrecall.pool.service.sessions import Reaper


def test_the_end_of_a_service_is_not_lost_beside_news() -> None:
    """Reserving wakes the reaper; a service that ends in the same moment cancels it. Python 3.11's
    ``asyncio.wait_for`` keeps only the first of the two, and the service never ended."""

    async def both_at_once() -> None:
        reaper = Reaper(inode=0, own_pid=1, sessions=list)
        running = asyncio.ensure_future(reaper.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reaper._wake.set()
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=30)
        reaper.close()
        assert done, "the reaper runs on"
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(both_at_once())
