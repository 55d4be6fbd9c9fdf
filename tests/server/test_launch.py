"""Where a config.json puts its three planes, and with which certificates; and ``--role``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.engines.base import Role, ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.server import launch
from kvrecall.server.mindie.planner import plan_config
from kvrecall.server.plan import Plan, Plane
from server.configs import right, server, write

pytest.importorskip("cryptography")

from server.certificates import Authority

Address = tuple[str, int]


def plan_of(folder: Path, **fields: Any) -> Plan:
    config = right()
    server(config).update(fields)
    return plan_config(write(folder, config))


def where(plan: Plan) -> dict[str, Address]:
    """The address of each plane."""
    found = {x.name: (x.host, x.port) for x in plan.spec.listeners}
    found[""] = (plan.spec.host, plan.spec.port)
    return {plane: found[plan.home(plane)] for plane in Plane}


ONE = "127.0.0.1"
PLACES: list[tuple[dict[str, Any], tuple[Address, Address, Address], int]] = [
    ({}, ((ONE, 1025), ("127.0.0.2", 1026), ("127.0.0.2", 1027)), 2),
    ({"managementIpAddress": None}, ((ONE, 1025), (ONE, 1026), (ONE, 1027)), 2),
    (
        {"managementPort": 1027},
        ((ONE, 1025), ("127.0.0.2", 1027), ("127.0.0.2", 1027)),
        1,
    ),
    (
        {"managementIpAddress": ONE, "managementPort": 1025, "metricsPort": 1025},
        ((ONE, 1025), (ONE, 1025), (ONE, 1025)),
        0,
    ),
    ({"managementIpAddress": ONE, "metricsPort": 1025}, ((ONE, 1025), (ONE, 1026), (ONE, 1025)), 1),
    (  # one port on two addresses is two listeners
        {"managementPort": 1025, "metricsPort": 1025},
        ((ONE, 1025), ("127.0.0.2", 1025), ("127.0.0.2", 1025)),
        1,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "addresses", "listeners"), PLACES)
def test_planes_that_coincide_share_a_listener(
    tmp_path: Path, fields: Any, addresses: Any, listeners: int
) -> None:
    plan = plan_of(tmp_path, **fields)
    assert tuple(where(plan).values()) == addresses
    assert len(plan.spec.listeners) == listeners


BAD: list[tuple[dict[str, Any], str]] = [
    ({"managementIpAddress": "localhost"}, "managementIpAddress is 'localhost'"),
    ({"managementIpAddress": "0.0.0.0"}, "managementIpAddress is '0.0.0.0'"),
    (
        {"managementIpAddress": "0.0.0.0", "allowAllZeroIpListening": True, "managementPort": 1025},
        "managementPort is 1025 on 0.0.0.0, which 127.0.0.1:1025 already takes",
    ),
    ({"ipAddress": "0.0.0.0", "allowAllZeroIpListening": True, "metricsPort": 1025},
     "metricsPort is 1025"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), BAD)
def test_addresses_that_cannot_be(tmp_path: Path, fields: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(tmp_path, **fields)
    assert said in str(error.value)
    assert "config.json:" in str(error.value)


@pytest.fixture
def certificates(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes the fields of a plane's certificates."""

    def fields(prefix: str, authority: str, name: str) -> dict[str, Any]:
        signer = Authority(tmp_path, authority)
        certificate, key, _ = signer.issue(name)
        return {
            f"{prefix}CaFile": [f"{authority}.pem"],
            f"{prefix}Cert": certificate.name,
            f"{prefix}Pk": key.name,
        }

    return fields


def tls_of(plan: Plan, plane: Plane) -> Any:
    found = {x.name: x.tls for x in plan.spec.listeners} | {"": plan.spec.tls}
    return found[plan.home(plane)]


def test_planes_without_certificates_use_those_of_the_one_before(
    tmp_path: Path, certificates: Any
) -> None:
    base = {"httpsEnabled": True, "tlsCaPath": str(tmp_path), **certificates("tls", "ca", "b")}
    plan = plan_of(tmp_path, **base)
    assert {tls_of(plan, plane).certificate.name for plane in Plane} == {"b.pem"}
    plan = plan_of(tmp_path, **base, **certificates("managementTls", "ca2", "m"))
    names = [tls_of(plan, plane).certificate.name for plane in Plane]
    assert names == ["b.pem", "m.pem", "m.pem"]
    assert [tls_of(plan, plane).authorities[0].name for plane in Plane][1] == "ca2.pem"
    own = certificates("metricsTls", "ca3", "x")
    plan = plan_of(tmp_path, **base, **own)
    assert [tls_of(plan, plane).certificate.name for plane in Plane] == ["b.pem", "b.pem", "x.pem"]
    del own["metricsTlsPk"]
    with pytest.raises(ConfigError, match="metricsTlsPk is required beside metricsTlsCert"):
        plan_of(tmp_path, **base, **own)
    with pytest.raises(ConfigError, match="there is no file"):
        plan_of(tmp_path, **base, **(own | {"metricsTlsPk": "none.pem"}))


def test_planes_of_the_command_line() -> None:
    spec = ServeSpec("m", ONE, 8000, {})
    at = {Plane.MANAGEMENT: "127.0.0.2:8100", Plane.METRICS: "[::1]:9100"}
    plan = launch.plan_model(spec, planes=at)
    assert where(plan) == {
        Plane.BUSINESS: (ONE, 8000),
        Plane.MANAGEMENT: ("127.0.0.2", 8100),
        Plane.METRICS: ("::1", 9100),
    }
    shared = launch.plan_model(spec, planes=dict.fromkeys(at, "127.0.0.2:8100"))
    assert [x.name for x in shared.spec.listeners] == ["management+metrics"]
    for wrong in ("8100", "127.0.0.1", ":8100", "a@b:1", "x:0", "x:70000", "http://x:1", "x:1/"):
        with pytest.raises(ConfigError, match="give HOST:PORT"):
            launch.plan_model(spec, planes={Plane.MANAGEMENT: wrong})


@pytest.mark.parametrize(
    ("words", "variable", "has"),
    [
        ((), "", False),
        ((), "one", True),
        (("--api-key", "one"), "", True),
        (("--max-num-seqs", "4", "--api_key=one"), "", True),
        (("--api-key", ""), "", False),
        (("--api-key=",), "", False),
        (("--api-key-x", "one"), "", False),
    ],
)
def test_keys_that_vllm_is_given_count(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], variable: str, has: bool
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    assert launch._has_key(ServeSpec("m", ONE, 1, {}, extra_args=words)) is has


def test_requests_in_the_clear_are_warned_of(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, managementIpAddress="192.0.2.1")
    assert any("in the clear" in warning for warning in plan.warnings)
    assert not plan_of(tmp_path).warnings


def plan_in(tmp_path: Path, role: Role, recall: dict[str, Any] | None) -> Any:
    (tmp_path / "config.json").write_text("{}")
    return launch.plan_model(ServeSpec(str(tmp_path), "127.0.0.1", 1, {}, recall=recall, role=role))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("recall", [None, {}, {"host_size": "1MiB"}])
def test_a_role_needs_a_pool_that_is_shared(
    tmp_path: Path, role: Role, recall: dict[str, Any] | None
) -> None:
    with pytest.raises(ConfigError, match=f"--role {role}: .* --pool-service"):
        launch.check(plan_in(tmp_path, role, recall))


def test_roles_in_vllms_words(tmp_path: Path) -> None:
    from kvrecall.engines.vllm.serving.app import connector_config, parse_args

    words = {Role.BOTH: "kv_both", Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
    for role, word in words.items():
        assert connector_config({}, role)["kv_role"] == word
    shared = {"backend": "service", "socket": "/tmp/x/pool.sock"}
    made = parse_args(plan_in(tmp_path, Role.DECODE, shared).spec)
    assert made.kv_transfer_config.kv_role == "kv_consumer"
    assert made.kv_transfer_config.is_kv_consumer
    assert not made.kv_transfer_config.is_kv_producer
