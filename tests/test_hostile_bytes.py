"""Files that users give and others may have written: read, or refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import fuzz, hostile, outcome

from kvrecall.config import RecallSettings
from kvrecall.engines.fingerprint import Memory
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import read_json
from kvrecall.modelconfig import read_fields
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.secret import opened
from kvrecall.server.access import read_keys
from kvrecall.server.mindie.pasted import read_pasted
from kvrecall.simulate.trace import read_trace

_MOST_READ = 260 << 20  # room for the largest trace, which is not touched
SETTINGS = {"host_size": "8GiB", "disk_path": "/d", "disk_size": "1GiB", "tenants": {"a": {}}}
MODEL = {"num_hidden_layers": 2, "layer_types": ["full", "window"], "text_config": {"head_dim": 8}}
MOONCAKE = {"master_server_address": "10.0.0.1:5", "protocol": "tcp", "local_hostname": "a"}
TRACE = b'{"timestamp": 27, "hash_ids": [1, 2, 3], "input_length": 1500}\n'
MEMORY = {"/a": [1, 2, 3, 4, "digest"]}


def model(path: Path) -> None:
    fields, _ = read_fields(path)
    for part in (fields, fields.part("text_config"), fields.of_layer(1)):
        part.number("num_hidden_layers", "head_dim", default=0)
        part.list("layer_types")
        part.text("layer_types")


def settings(path: Path) -> None:
    value = read_json(path).value
    if not isinstance(value, dict):
        raise ConfigError("no object")
    RecallSettings.from_mapping(value, "settings")


READERS: dict[str, tuple[Callable[[Path], Any], list[bytes]]] = {
    "json": (read_json, [json.dumps(SETTINGS, indent=1).encode()]),
    "settings": (settings, [json.dumps(SETTINGS).encode()]),
    "pasted": (read_pasted, ['"a"：5，\n"b": {“c”: 1,}'.encode(), json.dumps(MODEL).encode()]),
    "model": (model, [json.dumps(MODEL).encode()]),
    "mooncake": (lambda path: MooncakeSettings.of({"config": str(path)}), [
        json.dumps(MOONCAKE).encode(),
    ]),
    "memory": (lambda path: Memory(path).digests(), [json.dumps(MEMORY).encode()]),
    "keys": (lambda path: read_keys(path, "--api-key"), [b"# no key\nsk-1234567\n"]),
    "secret": (lambda path: opened({"a": {"file": str(path)}}, "remote"), [b"secret\r\n"]),
    "trace": (read_trace, [TRACE * 3, TRACE + TRACE.replace(b"27", b"1e999")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "given"
    path.touch(0o600)
    return path


@pytest.mark.parametrize("name", READERS)
@fuzz(80)
@given(data=st.data())
def test_a_file_is_read_or_refused_in_a_line(file: Path, name: str, data: st.DataObject) -> None:
    read, valid = READERS[name]
    content = data.draw(hostile(*valid))
    file.write_bytes(content)
    made = outcome(lambda _: read(file), content, ConfigError, beside=_MOST_READ)
    assert "\n" not in str(made) or not isinstance(made, Exception)
    if name == "trace" and not isinstance(made, Exception):
        assert made.requests == tuple(sorted(made.requests, key=lambda one: one.now))
        assert all(0 <= one.now < 1e12 for one in made.requests)


def test_a_file_without_an_end_takes_no_memory() -> None:
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        read_json(Path("/dev/zero"))
