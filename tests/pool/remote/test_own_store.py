"""The example of a tier of one's own, loaded by module path, against a real Redis."""

from __future__ import annotations

import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvrecall.config import RecallSettings
from kvrecall.errors import ConfigError
from kvrecall.pool import Pool
from kvrecall.pool.remote.backends import make_store
from kvrecall.pool.remote.store import Store
from kvrecall.processes.ports import free_port
from kvrecall.testing import chain, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.store_contract import Counter, StoreContract, names
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE

EXAMPLES = Path(__file__).parents[3] / "examples"
KIND = "own_store:RedisStore"
PASSWORD = "not-so-secret"


def redis_program() -> str | None:
    """The server's program. Debian's redis-tools hold it under another name: what it does is
    decided by the name it is called by."""
    names = ("redis-server", "valkey-server", "redis-check-rdb", "valkey-check-rdb")
    return next((found for name in names if (found := shutil.which(name))), None)


pytestmark = pytest.mark.skipif(redis_program() is None, reason="no Redis; scripts/setup brings it")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a real Redis in a process of its own, on loopback."""
    port = free_port()
    options = {"port": str(port), "bind": "127.0.0.1", "save": "", "requirepass": PASSWORD}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen(
        ["redis-server", *words], executable=redis_program(), stdout=subprocess.DEVNULL
    )

    def answers() -> bool:
        assert process.poll() is None, "Redis ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        except OSError:
            return False

    try:
        wait_until(answers)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def options(port: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return {"port": port, "password": PASSWORD}


class TestRedis(StoreContract):
    @pytest.fixture(autouse=True)
    def _options(self, options: dict[str, Any]) -> None:
        self.options = options

    def make(self, path: Path) -> Store:
        return make_store(KIND, self.options)

    @pytest.fixture(autouse=True)
    def _empty(self, _options: None, counter: Counter) -> None:
        """Each test begins with an empty server."""
        counter.store._ask([(b"FLUSHALL",)])  # type: ignore[attr-defined]


def test_it_is_short() -> None:
    assert len((EXAMPLES / "own_store.py").read_text().splitlines()) < 110


def test_a_pool_finds_in_it_what_another_stored(options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    file.chmod(0o600)
    remote = {"kind": KIND, **options, "ttl": 600, "password": {"file": str(file)}}
    raw = {"host_size": "4MiB", "remote": remote}
    config = RecallSettings.from_mapping(raw).pool
    keys = chain(NAMESPACE, 20, uuid.uuid4().hex)
    store = make_store(KIND, options)
    store._ask([(b"FLUSHALL",)])  # type: ignore[attr-defined]
    for saves in (True, False):
        with Pool.open(config) as pool, closing(Engine(pool, BLOCK_BYTES)) as engine:
            pool.register(NAMESPACE, BLOCK_BYTES)
            if saves:
                engine.save(keys)
                assert pool.flush(keys, 60.0)
            else:
                wait_until(lambda p=pool: p.find(keys).blocks == 20)  # type: ignore[misc]
                assert len(engine.recall(keys)) == 20
    name = store._ask([(b"RANDOMKEY",)])[0]  # type: ignore[attr-defined]
    assert 0 < store._ask([(b"TTL", name)])[0] <= 600  # type: ignore[attr-defined]
    store.close()


def test_a_server_that_is_not_there_or_says_no_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(OSError, match="refused"):
        Counter(make_store(KIND, {**options, "port": 1})).put(names(1))
    with pytest.raises(ConnectionError, match="WRONGPASS"):
        Counter(make_store(KIND, {**options, "password": "wrong"})).put(names(1))


def test_wrong_settings_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="unknown: prot; known: host, port"):
        make_store(KIND, {"prot": 1})
