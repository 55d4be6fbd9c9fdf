"""Settings hold no secrets: where they stand in the open they are refused, and nothing prints
what a file of one says. End to end: kvrecall_lab.hostile.keys."""

from __future__ import annotations

import json
import os
import stat
import time
import traceback
from pathlib import Path

import pytest

from kvrecall.config import RecallSettings
from kvrecall.engines.base import ServeSpec
from kvrecall.errors import ConfigError, TierError, hidden, hide
from kvrecall.jsonfile import parse_json
from kvrecall.pool.remote.backends import make_store
from kvrecall.secret import ACCESS, WRITE, exposure, is_secret, opened, refuse_open
from kvrecall.server.plan import Plan

MARK = "zq9'\\secret-of-mine"


@pytest.mark.parametrize(
    "name",
    "secret_access_key access_key_id accessKeyId aws_session_token sasKey service_account_key "
    "password redis-password PGPASSWORD accesskey jwt --api-key X-Api-Key Authorization "
    "sse_customer_key_base64".split(),
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    "url region endpoint web_identity_token_file google_application_credentials sse_kms_key_id "
    "client_id max-num-batched-tokens tokenizer monkey key_prefix keyspace metadata_server".split(),
)
def test_other_names(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "remote",
    [
        {"options": {"secret_access_key": MARK}},
        {"password": 71234567},
        {"passwords": [MARK]},
        {"each": [{"token": MARK}]},
        {"url": f"redis://me:{MARK}@host"},
        {"urls": ["redis://me@host"]},
        {"url": f"redis://:pass#/{MARK}@host"},
        {"address": f"me:{MARK}@host"},
        {"addresses": f"10.0.0.1:6379/0,me:{MARK}@10.0.0.2:6379/0"},
        {"address": f"corp/me:{MARK}@host:6379"},
        {"address": f":{MARK}@host"},
        {"address": f"jdbc:oracle:thin:me/{MARK}@//host:1521/x"},
        {"url": f"redis://me:a/{MARK}@host"},
        {"database": f"host=h password={MARK}"},
        {"storage": f"AccountName=a;AccountKey={MARK};"},
        {"header": f"Bearer {MARK}"},
        {"endpoint": f"https://host/x?a=b&X-Amz-Signature={MARK}"},
    ],
)
def test_a_secret_in_the_settings_is_refused_unseen(remote: dict[str, object]) -> None:
    file = r"\{.file.: ./path.\}"
    cures = {"objects": file, "some_module:Factory": file, "mooncake": "MC_REDIS_PASSWORD"}
    for kind, cure in cures.items():
        with pytest.raises(ConfigError, match=f"settings are printed; .*{cure}") as told:
            RecallSettings.from_mapping({"remote": {"kind": kind, **remote}}, "pool.json")
        assert str(told.value).startswith("pool.json: remote.")
        assert "secret-of-mine" not in repr(told.value)
        assert "7123" not in repr(told.value)


@pytest.mark.parametrize(
    "value",
    "/mnt/nas:2@site/kv ./kv/a:b@c file:///mnt/a:b@c s3://bucket/team:a@b/kv org/model@rev "
    "org/model:tag@rev registry.io:5000/org/image:v1@sha256:0a1b https://h:80/a:b@c "
    "me@host:80".split(),
)
def test_paths_and_names_of_models_are_no_secrets(value: str) -> None:
    refuse_open({"url": value}, "remote")


def test_what_is_none_is_not_refused() -> None:
    plain = {"url": "s3://b/p@1", "skip_signature": "true", "token": "", "at": "https://h/a?b=c@d"}
    refuse_open({**plain, "key": {"file": "/x"}, "email": "me@host", "encryption_key_id": "k"}, "x")


def test_a_file_of_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "it"
    options = {"inner": {"password": {"file": str(file)}}, "port": 1}
    with pytest.raises(ConfigError, match=r"remote\.inner\.password: there is no file .*write"):
        opened(options, "remote")
    file.write_text(f"{MARK}\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640, so others may read it"):
        opened(options, "remote")
    file.chmod(0o600)
    assert opened(options, "remote") == {"inner": {"password": MARK}, "port": 1}
    urls = "redis://me:pw@host/0?sig=5", "redis://me:a@pw@h/", "redis://:#/pw@h", "s3://h/#sig=5"
    for said in (f"no {MARK} here", f"got {[MARK]!r}", f"got {json.dumps(MARK)}", *urls):
        for error in (TierError(said), ConfigError(said)):
            assert not any(part in repr(error) for part in ("secret-of-mine", "pw", "sig=5"))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        opened(options, "remote")


@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
def test_a_factory_gets_what_the_file_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it"
    file.touch(0o600)
    file.write_text("hunter22")
    module = f"def make(options):\n    raise {kind}(f'cannot log in with {{options}}')\n"
    (tmp_path / f"picky_{kind}.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = r"cannot log in with \{'pw': '\*\*\*'\}"
    with pytest.raises(ConfigError, match=told) as error:
        make_store(f"picky_{kind}:make", {"pw": {"file": str(file)}})
    assert "hunter22" not in "".join(traceback.format_exception(error.value))


def test_a_secret_without_quotes_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"x:1:14: \*\*\* is not a JSON value"):
        parse_json('{"password": hunter2}', "x")
    with pytest.raises(ConfigError, match="hunter2 is not a JSON value"):
        parse_json('{"policy": hunter2}', "x")


def test_the_start_log_shows_no_option_that_is_a_secret() -> None:
    hide("in-a-file")
    words = ("--api-key", MARK, "--hf-token=abcd", "--x", f'{{"s3_secret_key": "{MARK[6:]}"}}')
    words += ("--kv", "{'token': 'abcd'}", "in-a-file", "http://me:abcd@h", "--api-key", "x", MARK)
    words += ("--x", '{"pw": "a\\"abcd"}', '--y={"headers": {"cookie": ["abcd"]}}')
    options = {"hf-token": "abcd", "max-model-len": 64}
    told = Plan(ServeSpec("m", "h", 1, options=options, extra_args=words)).summary()
    assert not any(part in told for part in ("of-mine", "abcd", "in-a-file"))
    assert "max-model-len=64" in told
    assert hidden("nothing to hide: {'a': 'b'}") == "nothing to hide: {'a': 'b'}"


@pytest.mark.parametrize("unit", "://a ://u:x ://a# ://a#x? ://u:1 ://a:b@ ://".split())
def test_a_hostile_text_is_hidden_in_linear_time(unit: str) -> None:
    """In seconds of this process's CPU: 1; by patterns that come back to a letter, 13 and more."""
    text = unit * (4_000_000 // len(unit))
    before = time.process_time()
    hidden(text)
    assert time.process_time() - before < 8


ME = os.geteuid()
FILE, FOLDER = stat.S_IFREG, stat.S_IFDIR


@pytest.mark.parametrize(
    ("mode", "owner", "forbidden", "root_too", "says"),
    [
        (FILE | 0o600, ME, ACCESS, False, ""),
        (FILE | 0o640, ME, ACCESS, False, "mode 0640, so others may read it; run: chmod 600 /p"),
        (FILE | 0o644, ME, WRITE, False, ""),
        (FILE | 0o666, ME, WRITE, False, "others can write to it; run: chmod 600 /p"),
        (FOLDER | 0o750, ME, ACCESS, False, "others may read it; run: chmod 700 /p"),
        (FOLDER | 0o770, ME, WRITE, False, "others can write to it; run: chmod 700 /p, or name a"),
        (FOLDER | 0o777, ME, 0, False, ""),
        (FOLDER | 0o700, ME + 1, WRITE, False, f"belongs to user {ME + 1}, not to {ME}; give"),
        (FILE | 0o600, ME + 1, ACCESS, True, "or use another file"),
        (FILE | 0o600, 0, ACCESS, True, ""),
        (FILE | 0o604, 0, ACCESS, True, "others may read it"),
    ],
)
def test_says_who_else_can_do_what_and_the_cure(
    mode: int, owner: int, forbidden: int, root_too: bool, says: str
) -> None:
    status = os.stat_result((mode, 1, 1, 1, owner, 0, 0, 0, 0, 0))
    why = exposure(Path("/p"), status, forbidden, root_too)
    assert says in why
    assert bool(says) == bool(why)
