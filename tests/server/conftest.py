"""One live server for all tests that only need some server: clients, schemas.

No test may end it; one that must starts its own (test_soak.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrecall.processes.ports import free_port
from server.live import LiveServer

PLACES = 32
"""Sequences that ``tiny_server`` runs at once."""


@contextmanager
def tiny_server(
    folder: Path, longest: int = 768, options: Sequence[str] = ()
) -> Iterator[LiveServer]:
    """A server of a random model called ``tiny``, ready, for up to ``longest`` tokens."""
    from kvrecall_lab.models import write_model

    write_model(folder / "model", "qwen3", hidden=64, layers=2, max_position=longest)
    port = free_port()
    words = [str(folder / "model"), "--port", str(port), "--served-model-name", "tiny"]
    words += ["--host-size", "32MiB", "--kv-cache-memory-bytes", "64MiB"]
    words += ["--max-model-len", str(longest), *options, "--", "--max-num-seqs", str(PLACES)]
    live = LiveServer(folder, words, f"http://127.0.0.1:{port}", warm=True)
    try:
        live.wait_ready()
        yield live
    finally:
        live.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tiny_server(tmp_path_factory.mktemp("tiny")) as live:
        yield live
