"""``kvrecall config check`` on invalid files: it reports the place, and never fails itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.errors import ConfigError
from kvrecall.server.mindie.check import report
from kvrecall.server.mindie.planner import plan_config
from kvrecall.server.mindie.reader import Problems
from server.configs import backend, model, right, server, write

RIGHT = right()
backend(RIGHT)["kvPoolConfig"] = {"backend": "embedded", "configPath": "pool.json"}
server(RIGHT).update(managementPort=1026, metricsPort=1027, tlsCert="a", tlsCaFile=["b"])
TEXT = json.dumps(RIGHT, indent=1)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["0.0.0.0", "::", "../x", "\x00", "{", '{"plugin_type":"mtp"}', 2**63, -1]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from paths(item, (*at, key))


def told(folder: Path, text: str | bytes) -> str | None:
    """The reported problem of the text, or what it was read as; None if there is none."""
    path = write(folder, right(), {"host_size": "1GiB"})
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        read = [line for line in plan_config(path).warnings if "config.json:" in line]
        return "\n".join(read) or None
    except Problems as error:
        return "\n".join(error.lines)
    except ConfigError as error:
        return str(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


quickly = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@quickly
@given(place=st.sampled_from(list(paths(RIGHT))), value=VALUES)
def test_any_value_anywhere(folder: Path, place: tuple[Any, ...], value: Any) -> None:
    config = copy.deepcopy(RIGHT)
    part = config
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    said = told(folder, json.dumps(config, indent=1))
    assert said is None or "config.json:" in said or "pool.json" in said or "there is no" in said


@quickly
@given(
    at=st.integers(0, len(TEXT)),
    removed=st.integers(0, 5),
    put=st.text(max_size=3) | st.sampled_from(list('{}[]",:')),
)
def test_any_slip_of_the_pen(folder: Path, at: int, removed: int, put: str) -> None:
    """Text that is not JSON is reported with line and column."""
    text = TEXT[:at] + put + TEXT[at + removed :]
    said = told(folder, text)
    try:
        json.loads(text.encode("utf-8", "surrogatepass").decode())
    except ValueError:
        assert said is not None
        assert "config.json:" in said


ODD: list[tuple[str | bytes, str]] = [
    ("", "config.json"),
    (b"\xff\xfe{\x00}\x00", "config.json"),
    (b"\x00" * 100, "config.json"),
    ("[" * 100_000, "config.json"),
    ('{"a":' * 100_000, "config.json"),
    ("[]", "must hold a JSON object"),
    ("null", "must hold a JSON object"),
    (TEXT.replace("1025", "1e999"), "config.json:5:"),
    (TEXT.replace("1025", "NaN"), "config.json:"),
    (TEXT.replace("1025", "9" * 5000), "config.json:"),
    (TEXT.replace('"worldSize"', '"worldsize"'), "is worldsize ("),
    (TEXT.replace('"port": 1025,', '"port": 1025, "port": 1026,'), "config.json:"),
]


@pytest.mark.parametrize(("text", "expected"), ODD, ids=range(len(ODD)))
def test_odd_files(folder: Path, text: str | bytes, expected: str) -> None:
    said = told(folder, text)
    assert said is not None
    assert expected in said
    assert not report(folder / "config.json", every=True)["ok"]


def test_every_mistake_is_told_at_once(folder: Path) -> None:
    text = TEXT.replace('"port": 1025,', "port: 1025, // the port").replace(": false", ": False")
    text = text.replace('"maxLinkNum"', "“maxLinkNum”").replace(
        '"worldSize": 1', '"worldSize": "1"'
    )
    said = told(folder, text)
    assert said is not None
    places = [line.partition("config.json:")[2].split(":")[0] for line in said.splitlines()]
    assert places == ["5", "5", "6", "7", "8", "24", "29"]


PLUGINS: list[tuple[str, str | None]] = [
    ('{"plugin_type":"la,prefix_cache","level":4,"window":5,"guess_set_size":5}', "level, window"),
    ('{"plugin_type":"memory_decoding","decoding_length":16}', None),
    ('{"plugin_type":"memory_decoding","decoding_length":16,"dynamic_algo":true}', "dynamic_algo"),
    ('{"plugin_type":"prefix_cache","num_speculative_tokens":2}', "num_speculative_tokens"),
    ('{"plugin_type":"splitfuse"}', None),
]


@pytest.mark.parametrize(("params", "idle"), PLUGINS)
def test_plugin_params_without_effect_are_told(
    tmp_path: Path, params: str, idle: str | None
) -> None:
    config = right()
    model(config)["plugin_params"] = params
    notes = [
        note for note in plan_config(write(tmp_path, config)).notes if "plugin_params." in note
    ]
    assert bool(notes) == (idle is not None)
    if idle is not None:
        assert all(name in notes[0] for name in idle.split(", "))
