"""The key file: accepted and refused forms, and that no error shows a key."""

from __future__ import annotations

import base64
import os
import re
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrecall.config import RecallSettings
from kvrecall.errors import ConfigError
from kvrecall.pool.cipher import read_keys
from kvrecall.pool_cli import app
from kvrecall.server.checks import check_pool

KEY = bytes(range(100, 132))
OTHER = bytes(range(7, 39))


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        KEY.hex().encode(),
        KEY.hex().upper().encode() + b"\n",
        base64.b64encode(KEY) + b"\n",
        base64.urlsafe_b64encode(KEY),
        b"# made on Friday\n\n  " + KEY.hex().encode() + b"  \n",
    ],
)
def test_one_key_in_any_form(tmp_path: Path, content: bytes) -> None:
    assert read_keys(key_file(tmp_path, content)) == (KEY,)


def test_several_keys_in_their_order(tmp_path: Path) -> None:
    text = f"{KEY.hex()}\n{base64.b64encode(OTHER).decode()}\n{KEY.hex()}\n"
    assert read_keys(key_file(tmp_path, text.encode())) == (KEY, OTHER)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no key"),
        (b"# nothing\n", "holds no key"),
        (KEY[:31], "holds 31 bytes|31 characters"),
        (KEY + KEY, "holds 64 bytes that are not text"),
        (KEY.hex()[:-1].encode(), "key:1: these 63 characters are not a key"),
        (KEY.hex().encode() + b"\nsecret", "key:2: these 6 characters are not a key"),
        (bytes(32), "not random"),
        (b"00" * 32, "not random"),
        (b"a" * 100_000, "larger than 64 KiB"),
    ],
)
def test_no_key(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys(key_file(tmp_path, content))
    text = str(caught.value).replace(str(tmp_path), "")
    assert KEY.hex()[:8] not in text
    assert "secret" not in text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_others_may_not_read_it(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*run: chmod 600"):
        read_keys(key_file(tmp_path, KEY, mode))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .* kvrecall pool key"):
        read_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file"):
        read_keys(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        read_keys(tmp_path / "pipe")  # and does not wait for a writer


def test_settings_name_the_file_and_it_is_checked_before_the_start(tmp_path: Path) -> None:
    path = key_file(tmp_path, KEY)
    settings = RecallSettings.from_mapping({"host_size": "4096B", "encryption_key_file": str(path)})
    assert settings.pool.encryption_key_file == path
    check_pool(settings.pool)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_pool(settings.pool)
    with pytest.raises(ConfigError, match="no effect with backend 'service'"):
        RecallSettings.from_mapping({"backend": "service", "encryption_key_file": str(path)})


def test_the_command_makes_and_rotates(tmp_path: Path) -> None:
    run, path = CliRunner(), tmp_path / "key"
    made = run.invoke(app, ["key", str(path)])
    (first,) = read_keys(path)
    assert (made.exit_code, first.hex() in made.output) == (0, False)
    again = run.invoke(app, ["key", str(path)])
    assert again.exit_code == 2
    assert re.search("exists and is not changed.*--rotate", " ".join(again.output.split()))
    assert read_keys(path) == (first,)
    assert run.invoke(app, ["key", str(path), "--rotate"]).exit_code == 0
    second, old = read_keys(path)
    assert (old, len({first, second})) == (first, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    assert run.invoke(app, ["key", str(tmp_path / "no" / "key")]).exit_code == 2
