"""The recovery: finds the blocks of an earlier process in the index, while the tier serves."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import compress, groupby
from pathlib import Path

from kvrecall.pool.disk.catalog import Catalog, DiskCounters
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.disk.index import MAX_ROWS, WAL_BYTES, Index, Rows
from kvrecall.pool.disk.slabs import SlabStore, slab_of

_LOG = logging.getLogger(__name__)
_SILENCE_S = 3.0


class Recovery:
    """Reads the index, once, in the flusher's thread before anything is stored: only then it is
    known which slots are free. A block is served from the moment its row was read; when all were,
    they are ranked for eviction.
    """

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        store: SlabStore,
        index: Index,
        codec: BlockCodec,
        counters: DiskCounters,
    ) -> None:
        self._path = path
        self._catalog = catalog
        self._store = store
        self._index = index
        self._codec = codec
        self._counters = counters
        self._taken = {slab.number: array("q") for slab in store.slabs()}
        self._strange = 0  # encrypted with a key that is not given (any more)
        self.ended = threading.Event()
        """Whether it has ended, well or not."""
        self.is_damaged = False
        """Whether the index could not be read to its end."""

    def run(self, is_closing: Callable[[], bool]) -> bool:
        """False if the tier is closing, or the medium allows no index."""
        try:
            try:
                if not self._read(is_closing):
                    return False
            except sqlite3.Error as error:
                if not self._begin_anew(error):
                    return False
            for number, addresses in self._taken.items():
                self._store.place(number, addresses)
            return self._catalog.rank_rest(is_closing)
        finally:
            self.ended.set()

    def _begin_anew(self, error: sqlite3.Error) -> bool:
        """The index cannot be read to its end: goes on with what was found. False if the medium
        allows no new one."""
        try:
            renew_index(self._index, self._catalog, self._store, str(error))
        except (sqlite3.Error, OSError) as failure:
            self.is_damaged = True
            _LOG.error(
                "disk tier: the index of %s cannot be read to its end (%s), nor can a new one be "
                "begun (%s); no more blocks are stored until a restart",
                self._path,
                error,
                failure,
            )
            return False
        self._counters.failed()
        return True

    def _read(self, is_closing: Callable[[], bool]) -> bool:
        """False if the tier is closing."""
        began = said = time.monotonic()
        bad: list[int] = []
        seen = 0
        damaged = self._index.damaged
        for rows, broken in self._index.rows():
            if is_closing():
                return False
            right = self._right(rows) if rows.keys else []
            wrong = set(self._catalog.recover(rows if all(right) else _only(rows, right)))
            good = list(compress(rows.addresses, right))
            bad += broken
            bad += [a for a, is_good in zip(rows.addresses, right, strict=True) if not is_good]
            bad += [good[place] for place in wrong]
            if wrong:
                good = [address for place, address in enumerate(good) if place not in wrong]
            for number, its in groupby(good, slab_of):
                self._taken[number].extend(its)
            seen += len(rows.keys) + len(broken)
            damaged += len(broken)
            if time.monotonic() - said > _SILENCE_S:
                said = time.monotonic()
                _LOG.info("disk tier: %d blocks read from the index of %s so far", seen, self._path)
        self._report_strange(seen)
        if damaged:
            self._counters.found_corrupt(damaged)
            _LOG.warning(
                "disk tier: %d rows in the index of %s are damaged; their blocks are dropped",
                damaged,
                self._path,
            )
        for start in range(0, len(bad), MAX_ROWS):
            self._index.delete(bad[start : start + MAX_ROWS])
        _LOG.info(
            "disk tier: %d blocks in %s found in %.2f s (%d lost)",
            seen - len(bad),
            self._path,
            time.monotonic() - began,
            len(bad),
        )
        return True

    def _right(self, rows: Rows) -> list[bool]:
        """Whether each row has a block that can be read."""
        known = list(map(self._codec.knows, rows.tags))
        self._strange += known.count(False)
        slots = self._store.are_slots(rows.addresses, rows.nbytes)
        right: list[bool] = (slots & known).tolist()
        return right

    def _report_strange(self, seen: int) -> None:
        if self._strange:
            _LOG.warning(
                "disk tier: %d of %d blocks in %s are encrypted with a key that "
                "encryption_key_file does not contain; they are dropped",
                self._strange,
                seen,
                self._path,
            )


def _only(rows: Rows, chosen: Sequence[bool]) -> Rows:
    """Those of the rows."""
    columns = (getattr(rows, column.name) for column in fields(rows))
    return Rows(*(list(compress(column, chosen)) for column in columns))


def renew_index(index: Index, catalog: Catalog, store: SlabStore, why: str) -> None:
    """Sets a damaged index aside and writes a new one, of the blocks that are known by now. Raises
    sqlite3.Error or OSError if the medium does not allow it."""
    store.limit_bytes -= index.begin_anew(why)
    index.limit(store.limit_bytes - store.file_bytes - WAL_BYTES)
    for rows in catalog.rows():
        index.insert(rows)
