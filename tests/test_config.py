"""Settings of the pool: units, defaults, and errors that name the key, the value and the cure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrecall.block import Namespace
from kvrecall.config import (
    RecallSettings,
    default_socket,
    help_of,
    option_of,
    parse_size,
    split_for_service,
)
from kvrecall.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (65536, 65536),
        ("1048576", 1 << 20),
        (0, 0),
        ("8B", 8),
        ("4GiB", 4 << 30),
        ("4GB", 4 * 10**9),
        ("1.5g", 1_500_000_000),
        (" 512 MiB ", 512 << 20),
        ("2k", 2000),
        ("7B", 7),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text, "host_size") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "4 apples", "-1GB", "4GiBs", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="host_size"):
        parse_size(text, "host_size")


@pytest.mark.parametrize(
    ("text", "meant"),
    [("8", "8GiB, or 8B"), (8, "8GiB"), ("1.5", "1.5GiB"), ("512", "512GiB"), ("4096", "4096KiB")],
)
def test_a_small_size_without_a_unit_is_refused(text: str | int, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"host_size: {text!r} has no unit.* write {meant}"):
        RecallSettings.from_mapping({"host_size": text})


def test_defaults() -> None:
    settings = RecallSettings.from_mapping({})
    assert settings.pool.host_bytes == 4 << 30
    assert settings.pool.disk is None
    assert settings.async_write
    assert settings.appraise_loads


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"host_sise": "4GiB"}, ["host_sise", "did you mean 'host_size'"]),
        ({"zzz": 1}, ["zzz", "known:"]),
        ({"host_size": True}, ["host_size", "True"]),
        ({"host_size": 0}, ["host_size", "more than 0"]),
        ({"host_size": "4 apples"}, ["host_size", "4 apples", "8GiB"]),
        ({"host_size": None}, ["host_size", "None"]),
        ({"disk_path": "/x"}, ["disk_size", "hard limit"]),
        ({"disk_size": "4GiB"}, ["disk_size", "disk_path"]),
        ({"disk_path": 7, "disk_size": 1}, ["disk_path", "7", "string"]),
        ({"async_write": "yes"}, ["async_write", "'yes'", "true or false"]),
        ({"load_or_compute": "never"}, ["load_or_compute", "never", "auto, load"]),
        ({"load_deadline": 0}, ["load_deadline", "above 0"]),
        ({"load_deadline": "soon"}, ["load_deadline", "number"]),
        ({"backend": "floppy"}, ["backend", "floppy", "embedded"]),
    ],
)
def test_errors_name_the_thing(raw: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RecallSettings.from_mapping(raw, "pool.json")
    text = str(caught.value)
    assert text.startswith("pool.json")
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_help_names_the_default() -> None:
    assert help_of("host_size") == "Host memory for blocks, a hard limit. Default: 4GiB."
    assert help_of("load_deadline").endswith("Default: 10.")
    assert help_of("disk_path").endswith("off without it.")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda key: f"pool.json:{len(key) - 6}", "pool.json:7: load_deadline is 0; allowed: abo"),
        (option_of, "--load-deadline is 0; allowed: above 0"),
    ],
)
def test_an_error_has_the_place_of_its_setting(place: Callable[[str], str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        RecallSettings.from_mapping({"load_deadline": 0}, place)


def test_settings_for_a_service_of_several_engines() -> None:
    raw = {"host_size": "1GiB", "load_deadline": 3, "audit": 0, "admin_socket": "/run/x/pool.sock"}
    pool, engines = split_for_service(raw)
    assert pool == {"host_size": "1GiB", "load_deadline": 3, "socket": "/run/x/pool.sock"}
    assert engines == {
        "backend": "service",
        "socket": "/run/x/pool.sock",
        "load_deadline": 3,
        "audit": 0,
    }
    assert RecallSettings.from_mapping(engines).service is not None


def test_namespaces_do_not_depend_on_order_and_never_run_together() -> None:
    assert Namespace.of({"a": "1", "b": "2"}) == Namespace.of({"b": "2", "a": "1"})
    assert Namespace.of({"a": "1,b"}).digest != Namespace.of({"a": "1", "b": ""}).digest
    base = Namespace.of({"a": "1"})
    assert base.derive(adapter="x").digest not in (base.digest, base.derive(adapter="y").digest)
    assert base.key(b"hash").startswith(base.digest)


def test_the_default_socket_is_in_a_folder_of_the_user_alone(tmp_path: Path) -> None:
    user = str(os.getuid())
    assert default_socket(tmp_path) == Path(f"/tmp/kvrecall-{user}/pool.sock"), "there is none"
    (tmp_path / user).mkdir(mode=0o700)
    assert default_socket(tmp_path) == tmp_path / user / "kvrecall" / "pool.sock"
    (tmp_path / user).chmod(0o755)
    assert default_socket(tmp_path) == Path(f"/tmp/kvrecall-{user}/pool.sock"), "others enter it"
