"""Tenants, pins, sizes and listings by the command line."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrecall.block import SHARED, tenant_of
from kvrecall.config import (
    Amount,
    DiskConfig,
    PoolConfig,
    PoolTerms,
    RecallSettings,
    TenantRules,
    TenantTerms,
)
from kvrecall.errors import ConfigError
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.admin import _COMMANDS, PrefixTrees
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine
from pool.service.command import as_json, pool

MIB = 1 << 20
ONE, TWO = namespace("one"), namespace("two")
SIZE = 60_000
SLOT = 61_440
ANN, EVE = tenant_of("ann"), tenant_of("eve")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceThread]:
    """Ann has 10 blocks of one model; Eve two chains of 5 of another, and no tenant one."""
    quota = PoolTerms(tenants=TenantRules(TenantTerms(Amount(16 * MIB), Amount(share=0.5))))
    config = PoolConfig(32 * MIB, DiskConfig(tmp_path / "disk", 64 * MIB), terms=quota)
    service = ServiceThread(config, tmp_path / "sock")
    client = ServiceClient(tmp_path / "sock", call_timeout_s=60.0)
    for name in (ONE, TWO):
        client.register(name, SIZE)
    engine = Engine(client, SIZE)
    for name, length, salt, tenant in (
        (ONE, 10, "a", ANN),
        (TWO, 5, "b", EVE),
        (TWO, 5, "c", EVE),
        (TWO, 5, "d", SHARED),
    ):
        engine.save(chain(name, length, salt), tenant)
        assert client.flush(chain(name, length, salt), 60.0)
    engine.close()
    client.close()
    yield service
    service.close()


@pytest.fixture
def at(service: ServiceThread, tmp_path: Path) -> tuple[object, ...]:
    return ("--socket", tmp_path / "sock")


def rows(*words: object) -> dict[str, Any]:
    return {row["name"]: row for row in as_json("ls", *words)["rows"]}


def test_ls_by_everything(at: tuple[object, ...]) -> None:
    assert {n: r["disk_blocks"] for n, r in rows(*at, "--by", "model").items()} == {
        "one": 10,
        "two": 15,
    }
    assert {n: r["host_blocks"] for n, r in rows(*at, "--by", "tenant").items()} == {
        ANN: 10,
        EVE: 10,
        SHARED: 5,
    }
    chains = rows(*at, "--by", "chain")
    assert set(chains) == {
        chain(name, length, salt)[-1].hex()
        for name, length, salt in ((ONE, 10, "a"), (TWO, 5, "b"), (TWO, 5, "c"), (TWO, 5, "d"))
    }
    assert sorted(row["depth"] for row in chains.values()) == [4, 4, 4, 9]
    assert len(rows(*at, "--by", "block")) == 25
    assert len(rows(*at, "--by", "block", "--limit", 7)) == 7
    assert as_json("ls", *at, "--by", "block", "--limit", "7")["total"] == 25
    by_size = as_json("ls", *at, "--by", "tenant", "--sort", "blocks")["rows"]
    assert by_size[-1]["name"] == SHARED


def test_ls_of_some(at: tuple[object, ...]) -> None:
    assert set(rows(*at, "--by", "tenant", "-m", "two")) == {EVE, SHARED}
    assert set(rows(*at, "--by", "model", "-t", "salt:ann")) == {"one"}
    assert set(rows(*at, "--by", "tenant", "-n", ONE.digest.hex()[:6])) == {ANN}
    assert rows(*at, "--by", "tenant", "--tier", "disk")[ANN]["host_blocks"] == 0
    assert rows(*at, "--older-than", "1h") == {}
    assert len(rows(*at, "--by", "block", "--younger-than", "1h")) == 25
    assert rows(*at, "--pinned") == {}
    assert EVE in pool("ls", *at, "--by", "tenant").stdout
    for wrong, text in (
        (("--tier", "tape"), "allowed: host, disk"),
        (("-t", "ann"), "is not a tenant"),
        (("--sort", "colour"), "known: size"),
        (("-m", "three"), "see: kvrecall pool ls"),
    ):
        done = pool("ls", *at, *wrong)
        assert done.exit_code == 2
        assert text in done.stderr


def test_a_model_with_several_groups(at: tuple[object, ...], service: ServiceThread) -> None:
    """Its groups have a row each; a chain is one row, and is pinned with what hangs on it."""
    full, window = (ONE.derive(group=name) for name in ("0: full", "1: window of 1024"))
    service.pool.register(full, SIZE)
    service.pool.register(window, 5000)
    keys, hanging = chain(full, 6, "g"), chain(window, 6, "g")
    for wanted, parents in ((keys, None), (hanging, keys)):
        service.pool.reserve(wanted, parents=parents)
        service.pool.commit(wanted)
    found = rows(*at)
    assert [found[name.digest.hex()]["group"] for name in (ONE, full, window)] == [
        "", "0: full", "1: window of 1024",
    ]  # fmt: skip
    assert found[window.digest.hex()]["host_blocks"] == 6
    assert "group 1: window of 1024" in " ".join(pool("ls", *at).stdout.split())
    assert rows(*at, "--by", "model")["one"]["host_blocks"] == 22
    chains = rows(*at, "--by", "chain", "-n", full.digest.hex())
    assert set(chains) == {keys[-1].hex()}
    assert rows(*at, "--by", "chain", "-n", window.digest.hex()) == {}
    trees = {tree.namespace: tree for tree in PrefixTrees(100).run(service.pool, lambda *_: None)}
    beside = trees[window.digest.hex()]
    assert (beside.model, beside.blocks) == ("one, KV group 1: window of 1024", 6)
    assert beside.children == [] != trees[full.digest.hex()].children
    as_json("pin", *at, "--block", keys[3].hex())
    pinned = rows(*at, "--by", "block", "--pinned")
    assert set(pinned) == {key.hex() for key in (*keys[:4], *hanging[:4])}


def test_drop_by_tenant_leaves_pinned_blocks(at: tuple[object, ...]) -> None:
    leaf = chain(TWO, 5, "b")[-1].hex()
    assert as_json("pin", *at, "--block", leaf[32:48]) == {"blocks": 5, "bytes": 5 * SLOT}
    assert as_json("drop", *at, "-t", EVE, "--yes") == {"dropped": 5, "pinned": 5}
    assert "5 pinned ones stay" in pool("drop", *at, "-t", EVE, "--yes").stdout
    assert as_json("drop", *at, "-t", EVE, "--with-pinned", "--yes") == {"dropped": 5, "pinned": 0}
    assert set(rows(*at, "--by", "tenant")) == {ANN, SHARED}


def test_pin_a_prefix_a_namespace_and_a_tenant(at: tuple[object, ...]) -> None:
    middle = chain(ONE, 10, "a")[3].hex()
    assert as_json("pin", *at, "--block", middle)["blocks"] == 4
    assert rows(*at, "--by", "model", "--pinned")["one"]["pinned_blocks"] == 4
    assert as_json("pin", *at, "-m", "two")["blocks"] == 15
    assert as_json("unpin", *at, "-t", "-")["blocks"] == 5
    assert set(rows(*at, "--by", "tenant", "--pinned")) == {ANN, EVE}
    assert as_json("stat", *at)["stats"]["tiers"][0]["pinned_bytes"] == 14 * SLOT
    assert as_json("unpin", *at, "--all")["blocks"] == 14
    assert rows(*at, "--by", "tenant", "--pinned") == {}
    for words, text in (
        (("pin",), "select blocks"),
        (("pin", "--block", "zz"), "no block's name begins"),
        (("pin", "--block", ""), "select blocks"),
    ):
        done = pool(*words, *at)
        assert done.exit_code == 2
        assert text in done.stderr


def test_pins_beyond_the_limit_are_refused(at: tuple[object, ...]) -> None:
    assert pool("resize", *at, "--host", "2MiB").exit_code == 0
    done = pool("pin", *at, "-t", EVE, "-t", ANN)
    assert done.exit_code == 2
    assert "pin_limit" in done.stderr
    assert rows(*at, "--pinned") == {}


def test_resize(at: tuple[object, ...], service: ServiceThread) -> None:
    assert as_json("resize", *at, "--host", "1MiB") == {"host": MIB, "disk": None}
    assert sum(row["host_bytes"] for row in rows(*at).values()) <= MIB
    assert "done" in pool("resize", *at, "--disk", "16MiB", "--host", "32MiB").stdout
    tiers = as_json("stat", *at)["stats"]["tiers"]
    assert [tier["capacity_bytes"] for tier in tiers] == [32 * MIB, 16 * MIB]
    assert as_json("verify", *at, "--yes") == {"checked": 25, "damaged": 0}
    for wrong, text in (
        (("--host", "1TiB"), "this pool can grow to"),
        (("--disk", "1000000TiB"), "of the file system of"),
        (("--disk", "1MiB"), "the minimum is 8MiB"),
        (("--host", "much"), "is not a size"),
        ((), "specify the tier to resize"),
    ):
        done = pool("resize", *at, *wrong)
        assert done.exit_code == 2, wrong
        assert text in done.stderr


def test_a_host_that_grows_under_its_engines(tmp_path: Path) -> None:
    """An engine that mapped the arena before finds the blocks that came into the new part."""
    config = PoolConfig(4 * MIB, host_most_bytes=16 * MIB)
    service = ServiceThread(config, tmp_path / "sock")
    client = ServiceClient(tmp_path / "sock", call_timeout_s=60.0)
    client.register(ONE, SIZE)
    engine = Engine(client, SIZE)
    keys = chain(ONE, 150)
    engine.save(keys[:100])
    assert client.find(keys).blocks <= 4 * MIB // SLOT
    done = pool("resize", "--host", "10MiB", "--socket", tmp_path / "sock")
    assert done.exit_code == 0, done.stderr
    assert as_json("stat", "--socket", tmp_path / "sock")["stats"]["tiers"][0][
        "capacity_bytes"
    ] == (10 * MIB)
    wait_until(lambda: len(engine.save(keys)) > 0 and client.find(keys).blocks == 150)
    assert engine.recall(keys) == ("host",) * 150
    done = pool("resize", "--host", "17MiB", "--socket", tmp_path / "sock")
    assert done.exit_code == 2
    assert "host_max_size" in done.stderr
    engine.close()
    client.close()
    service.close()


def test_stat_tells_of_tenants(at: tuple[object, ...]) -> None:
    seen = as_json("stat", *at)
    assert seen["tenant_count"] == 3
    ann = next(tenant for tenant in seen["tenants"] if tenant["tenant"] == ANN)
    assert ann == {
        "tenant": ANN,
        "host_bytes": 10 * SLOT,
        "host_limit": 16 * MIB,
        "disk_bytes": 10 * SLOT,
        "disk_limit": 32 * MIB,
        "refused": 0,
        "evicted": 0,
    }
    shown = pool("stat", "--once", *at).stdout
    assert EVE[:6] in shown
    assert "write policy through" in shown


def test_a_folder_is_administered_alike(at: tuple[object, ...], service: ServiceThread) -> None:
    folder = Path(str(at[1])).with_name("disk")
    here = ("--disk-path", folder)
    done = pool("pin", *here, "-t", ANN)
    assert done.exit_code == 1
    assert "cannot be administered while it runs; a service's can: --socket" in done.stderr
    service.close()
    assert as_json("pin", *here, "-t", ANN)["blocks"] == 10
    assert rows(*here, "--by", "tenant", "--pinned")[ANN]["pinned_blocks"] == 10
    assert as_json("drop", *here, "-t", EVE, "--yes") == {"dropped": 10, "pinned": 0}
    assert as_json("unpin", *here, "--all")["blocks"] == 10


def test_another_protocol_is_refused_in_words(at: tuple[object, ...]) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(at[1]))
        sock.sendall(p.frame_of(p.Hello(p.PROTOCOL - 1, "0.0.9")))
        refusal = p.read_reply(sock.recv(4096)[4:])
    assert isinstance(refusal, p.Rejection)
    assert f"the client kvrecall 0.0.9 (protocol {p.PROTOCOL - 1}); run the same" in refusal.reason


def test_another_form_of_a_message_is_another_protocol() -> None:
    """The forms of all that travels, as a number: with it, PROTOCOL changes."""
    results = [kind.result for kind in _COMMANDS.values()]
    forms = [p.Hello, p.Request, p.Reply, *_COMMANDS.values(), *results]
    told = repr(msgspec.inspect.multi_type_info(forms)).encode()
    assert (p.PROTOCOL, hashlib.blake2b(told, digest_size=4).hexdigest()) == (115, "561dd563")


def test_settings_of_tenants() -> None:
    settings = RecallSettings.from_mapping(
        {
            "tenant_quota": "25%",
            "ttl": "30d",
            "tenants": {"salt:ann": {"host": "1GiB", "ttl": "1h"}, "-": {}},
            "write_policy": "back",
            "host_watermarks": [0.9, 0.8],
        }
    )
    terms = settings.pool.terms
    assert terms.tenants.of(EVE) == TenantTerms(
        Amount(share=0.25), Amount(share=0.25), 30 * 86400.0
    )
    assert terms.tenants.of(ANN) == TenantTerms(Amount(1 << 30), None, 3600.0)
    assert terms.tenants.of(SHARED) == TenantTerms()
    assert (terms.write_policy, terms.host_marks.high) == ("back", 0.9)
    for wrong, text in (
        ({"tenant_quota": "0%"}, "above 0%"),
        ({"tenant_quota": {"tape": "1GiB"}}, "known here: host, disk"),
        ({"tenants": {"ann": {}}}, "is not a tenant"),
        ({"tenants": {"salt:ann": 5}}, "must be"),
        ({"ttl": "soon"}, "is not an age"),
        ({"host_watermarks": [0.5, 0.9]}, "low <= high"),
        ({"write_policy": "behind"}, "through, back, selective"),
        ({"pin_limit": 2}, "at most 1"),
        ({"backend": "service", "tenant_quota": "25%"}, "no effect with backend"),
    ):
        with pytest.raises(ConfigError, match=text):
            RecallSettings.from_mapping(wrong)


def test_tenants_through_the_service_share_the_arena_by_quota(
    at: tuple[object, ...], service: ServiceThread
) -> None:
    client = ServiceClient(Path(str(at[1])), call_timeout_s=60.0)
    client.register(ONE, SIZE)
    engine = Engine(client, SIZE)
    for number in range(80):
        engine.save(chain(ONE, 10, f"flood {number}"), EVE)
    assert client.find(chain(ONE, 10, "a")).blocks == 10
    wait_until(lambda: rows(*at, "--by", "tenant")[EVE]["host_bytes"] <= 16 * MIB)
    engine.close()
    client.close()
