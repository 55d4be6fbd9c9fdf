"""Page-locks host memory for a device, so that copies run at full speed and beside the host's work,
and kernels may read it by its address.

A thread locks, chunk after chunk: all that its owner has populated before the engine serves, and
later what it grows by. Locking what is not populated would populate it.
Where the system refuses, the memory stays as it is: copies are slower, and right.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.engines.vllm.device import driver

logger = logging.getLogger("vllm.kvrecall")

CHUNK_BYTES = 1 << 28
"""Locked in one call, during which the process may wait to launch anything. A driver's call takes
less than 512 GiB."""

_IDLE_S = 1.0
"""Between two looks at whether more is populated."""


class PageLock:
    """Locks the leading bytes of a mapping, in a thread of its own. Owned by its device."""

    def __init__(
        self, memory: torch.Tensor, device: torch.device, populated: Callable[[], int]
    ) -> None:
        """``memory``: uint8 ``[bytes]``, mapped until ``close``. ``populated``: as of
        ``Device.lock``."""
        self.begin = memory.data_ptr()
        self.end = self.begin + memory.numel()
        self._device = device
        self._populated = populated
        self._locked = 0  # leading bytes; the thread raises it
        self.settled = threading.Event()  # when all that is populated is locked, or refused
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrecall-page-lock", daemon=True)
        self._thread.start()

    def has(self, addresses: npt.NDArray[np.int64], nbytes: int) -> bool:
        """Whether all that lies in this memory, of ``nbytes`` from each address on, is locked."""
        inside = addresses[(addresses >= self.begin) & (addresses < self.end)]
        return int(inside.max(initial=0)) + nbytes <= self.begin + self._locked or not len(inside)

    def covers(self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bool:
        """Whether all of these bytes lie in this memory, and are locked."""
        end = int((addresses + sizes).max())
        return self.begin <= int(addresses.min()) and end <= self.begin + self._locked

    def close(self) -> None:
        """Unlocks. No work on the memory may be queued."""
        self._stop.set()
        self._thread.join()
        with torch.accelerator.device_index(self._device.index):
            for start in range(0, self._locked, CHUNK_BYTES):
                driver.host_unregister(self.begin + start)
        self._locked = 0

    def _run(self) -> None:
        """Thread."""
        try:
            self._lock_populated()
        except Exception as error:  # noqa: BLE001 - whatever a driver raises, copies are made without
            logger.warning("kvrecall: host memory is not page-locked: %s; copies are slower", error)
        self.settled.set()

    def _lock_populated(self) -> None:
        """Locks what is populated, and what will be."""
        # A new thread's device is the first, on which this process has nothing to do.
        with torch.accelerator.device_index(self._device.index):
            while not self._stop.is_set() and self._locked < self.end - self.begin:
                chunk = min(CHUNK_BYTES, self.end - self.begin - self._locked)
                if self._populated() < self._locked + chunk:
                    self.settled.set()
                    self._stop.wait(_IDLE_S)
                elif driver.host_register(self.begin + self._locked, chunk):
                    self._locked += chunk
                else:
                    logger.warning(
                        "kvrecall: the system page-locked %d of the host tier's %d bytes and "
                        "refuses more: copies of the rest are slower. Make host_size smaller or "
                        "raise the limit of locked memory (ulimit -l)",
                        self._locked,
                        self.end - self.begin,
                    )
                    break


def numa_node_at(pci_address: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device. None if the kernel does not know it."""
    try:
        node = int((root / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
