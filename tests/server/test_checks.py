"""Errors found before an engine is loaded, and that the checks change nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import KVRECALL, ran

from kvrecall.config import DiskConfig, PoolConfig, RemoteConfig
from kvrecall.engines.base import ServeSpec
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.disk.folder import FolderLock
from kvrecall.processes.ports import free_port
from kvrecall.server import checks, launch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["/none", "./none", "../none", "~/none", "none", "a/b/c", ""])
def test_missing_model(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder|not a model folder"):
        checks.check_model(name)


def test_model(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_model(str(model))
    checks.check_model("Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        checks.check_model(str(tmp_path))
    with pytest.raises(ConfigError, match="is a file"):
        checks.check_model(str(model / "config.json"))
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ConfigError, match="no folder"):  # not the hub: the first part is a folder
        checks.check_model(f"{tmp_path.name}/modell")


def disk(path: Path, size: int = 8 << 20) -> PoolConfig:
    return PoolConfig(host_bytes=1 << 20, disk=DiskConfig(path, size))


def test_pool(tmp_path: Path) -> None:
    checks.check_pool(disk(tmp_path / "new" / "deeper"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(TierError, match="disk_size"):
        checks.check_pool(disk(tmp_path, 1 << 60))
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="not a folder"):
        checks.check_pool(disk(tmp_path / "file"))
    with pytest.raises(TierError, match="not a folder"):
        checks.check_pool(disk(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"host_size: .* this machine .* left"):
        checks.check_pool(PoolConfig(host_bytes=1 << 60))


MOONCAKE = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
}


def test_a_store_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's tier is away then, as when its master is; another store cannot be made at all."""
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    pool = PoolConfig(
        1 << 20, remote=RemoteConfig("mooncake", {**MOONCAKE, "allow_plaintext": True})
    )
    for here in (True, False):
        (said,) = checks.check_pool(pool, here)
        assert said == "mooncake is not installed; pip install 'kvrecall[mooncake]'"
    monkeypatch.setitem(sys.modules, "obstore", None)
    url = {"url": "s3://bucket", "allow_plaintext": True}
    with pytest.raises(ConfigError, match=r"pip install 'kvrecall\[objects\]'"):
        checks.check_pool(PoolConfig(1 << 20, remote=RemoteConfig("objects", url)))


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    spec = ServeSpec("m", "", 0, {"tensor-parallel-size": 4, "data-parallel-size": 2})
    checks.check_devices(spec, tmp_path)  # of a CPU
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="over 8 devices, and this host has 2; to join several"):
        checks.check_devices(spec, tmp_path)
    checks.check_devices(replace(spec, extra_args=("--data-parallel-rank", "0")), tmp_path)


def test_folder_in_use(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TierError, match=f"in use by process {os.getpid()}"):
        checks.check_pool(disk(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    lock.release()
    checks.check_pool(disk(tmp_path))


def test_help_is_fast_and_without_engine() -> None:
    code = (
        "import sys, kvrecall.cli; kvrecall.cli.app(['serve', '--help'], standalone_mode=False);"
        "bad = {'vllm', 'torch', 'fastapi'} & set(sys.modules); sys.exit(f'imported {bad}' if bad "
        "else 0)"
    )
    done = ran(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "--disk-path" in done.stdout


def test_example_is_right_but_for_the_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    example = ran(KVRECALL, "config", "example").stdout
    above = example.partition('"modelWeightPath"')[0].count("\n")
    path.write_text("\n" * (99 - above) + example)  # `:100:` is an emoji to rich
    done = ran(KVRECALL, "config", "check", str(path))
    assert (done.returncode, ":100:" in done.stderr) == (2, True)
    assert "modelWeightPath is '/path/to/the/model'; there is no such folder" in done.stderr
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    path.write_text(ran(KVRECALL, "config", "example", str(tmp_path / "m")).stdout)
    done = ran(KVRECALL, "config", "check", str(path))
    assert done.returncode == 0, done.stderr
    for words in ("cacheBlockSize", "without effect", "vllm --max-model-len", "pool host_size"):
        assert words in done.stdout


def test_retrieval_is_asked_for_and_its_settings_checked(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ServeSpec(str(model), "127.0.0.1", free_port(), {}, recall={}, retrieval=True)
    plan = launch.plan_model(spec)
    assert plan.spec.retrieval
    monkeypatch.setenv("VLLM_RETRIEVAL_TOPK_PERCENT", "20")
    with pytest.raises(ConfigError, match="VLLM_RETRIEVAL_TOPK_PERCENT is 20"):
        launch.check(plan)


def test_retrieval_asked_for_by_vllms_variable_is_checked_before_the_engine_loads(
    model: Path,
) -> None:
    words = ("serve", str(model), "--port", str(free_port()), "--no-pool")
    environ = {"VLLM_PLUGINS": "retrieval", "VLLM_RETRIEVAL_TOPK_PERCENT": "20"}
    done = ran(sys.executable, "-m", "kvrecall", *words, env={**os.environ, **environ})
    assert done.returncode == 2
    assert "VLLM_RETRIEVAL_TOPK_PERCENT is 20" in done.stderr
    assert "loading the engine" not in done.stderr
