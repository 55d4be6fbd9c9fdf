"""``kvrecall doctor``: each check detects its fault in a real setting, and changes nothing."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import configs
from support.commands import Commands
from typer.testing import CliRunner

from kvrecall.config import DiskConfig, PoolConfig, RecallSettings
from kvrecall.doctor import cli, machine
from kvrecall.doctor.pool import check_folder, check_pool, file_system_of, read_settings
from kvrecall.engines.vllm.compat.versions import BUILT_ON, SUPPORTED
from kvrecall.pool import Pool
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.server.checks import Finding, Health
from kvrecall.testing import chain
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.tier_contract import NAMESPACE

MODEL = Path(__file__).parents[2] / "models" / "recall-tiny"
MIB = 1 << 20


def asked(*words: object, status: int | None = None) -> dict[str, Any]:
    """The output of ``kvrecall doctor --quick --json WORDS``."""
    done = CliRunner().invoke(cli.app, ["--quick", "--json", *map(str, words)])
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (0 if report["fits"] else 1), done.stderr
    assert status in (None, done.exit_code), report
    return report


def one(report: dict[str, Any], area: str, check: str) -> dict[str, Any]:
    (found,) = (f for f in report["findings"] if (f["area"], f["check"]) == (area, check))
    assert isinstance(found, dict)
    return found


def of_pool(config: PoolConfig) -> dict[str, Finding]:
    return {each.check: each for each in check_pool(RecallSettings(config))}


def test_the_shape_of_json() -> None:
    report = asked(MODEL, "--host-size", "64MiB")
    assert list(report) == ["doctor", "version", "fits", "findings"]
    assert report["doctor"] == 1
    for each in report["findings"]:
        assert list(each) == ["area", "check", "state", "found", "cure", "figures"]
        assert each["state"] in set(Health)
        assert each["found"]
    names = [(each["area"], each["check"]) for each in report["findings"]]
    assert len(names) == len(set(names)), "a program finds a check by its area and name"
    assert {"installed", "machine", "pool", "model"} == {area for area, _ in names}


def test_for_people() -> None:
    done = CliRunner().invoke(cli.app, ["--quick", "--host-size", "999TiB"])
    assert done.exit_code == 1
    assert "set a smaller host_size" in done.stdout
    last = done.stdout.splitlines()[-1]
    report = asked("--host-size", "999TiB", status=1)
    host = one(report, "pool", "host")
    assert (host["state"], host["figures"]["bytes"]) == ("broken", 999 << 40)
    assert "set a smaller host_size" in host["cure"]
    states = [each["state"] for each in report["findings"]]
    assert last == f"1 broken; warnings: {states.count('warning')}, notes: {states.count('note')}"


# -- what is installed --------------------------------------------------------------------------


def vllm_of(version: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on only this vLLM can be found, by its metadata; None: none."""
    folder.mkdir()
    if version is not None:
        metadata = folder / f"vllm-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
    monkeypatch.setattr(sys, "path", [str(folder)])


@pytest.mark.parametrize(
    ("version", "serves", "state"),
    [
        (f"{BUILT_ON}.1+cu130", True, Health.OK),
        ("99.0.0", True, Health.BROKEN),
        ("0.9.2", True, Health.BROKEN),
        ("0.1.dev1+g1234567", True, Health.WARNING),  # from source, without tags
        (None, True, Health.BROKEN),
        (None, False, Health.WARNING),
    ],
)
def test_versions_of_vllm(
    version: str | None,
    serves: bool,
    state: Health,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm_of(version, tmp_path / "site", monkeypatch)
    found = {each.check: each for each in machine.check_packages(serves)}
    assert found["vllm"].state is state
    assert found["vllm"].figures == {"version": version, "supported": SUPPORTED}
    assert bool(found["vllm"].cure) == (state is not Health.OK)
    assert found["objects"].cure == "pip install 'kvrecall[objects]'"
    assert (found["torch"].state is Health.BROKEN) == (version is not None)


def test_extras_are_those_of_the_project() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for extra, (names, _) in machine.EXTRAS.items():
        brought = " ".join(extras["optional-dependencies"][extra])
        assert any(name in brought for name in names)


STUBS = {
    "torch": "raise ImportError('libcudart.so.13: cannot open shared object file')",
    "vllm": "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
}


def test_an_engine_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that lacks a library, and a vLLM that ends its process: in a child process, so that
    the doctor survives and reports it."""
    for name, text in STUBS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / f"vllm-{BUILT_ON}.0.dist-info").mkdir()
    (tmp_path / f"vllm-{BUILT_ON}.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {BUILT_ON}.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getenv("PYTHONPATH", "")]))
    found = {each.check: each for each in machine.check_engine(None)}
    assert {each.state for each in found.values()} == {Health.BROKEN}
    assert "libcudart.so.13" in found["torch"].found
    assert "killed by SIGILL after torch" in found["process"].found


# -- the machine --------------------------------------------------------------------------------


def test_figures_of_the_machine_are_the_kernels() -> None:
    report = asked()
    memory = one(report, "machine", "memory")["figures"]
    assert 0 < memory["available_bytes"] <= memory["total_bytes"]
    assert one(report, "machine", "cpu")["figures"]["cores"] == len(os.sched_getaffinity(0))
    processes = one(report, "machine", "processes")["figures"]
    assert processes["own_namespace"] == (os.readlink("/proc/self/ns/pid") != "pid:[4026531836]")


# -- the pool -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "check", "said"),
    [
        ('{"host_sise": "1GiB"}', "settings", "pool.json:1:2: unknown setting 'host_sise'"),
        ('{"host_size": 8}', "settings", "8 has no unit"),
        ('{"policy": "lur", "host_size": "1MiB"}', "policy", "'lur' is unknown"),
        ('{"remote": {"kind": "mooncake"}, "host_size": "1MiB"}', "remote", "local_hostname"),
        ('{"encryption_key_file": "/none", "host_size": "1MiB"}', "encryption", "/none"),
    ],
)
def test_settings_that_are_wrong(tmp_path: Path, text: str, check: str, said: str) -> None:
    (tmp_path / "pool.json").write_text(text)
    found = one(asked("--pool-config", tmp_path / "pool.json", status=1), "pool", check)
    assert found["state"] == "broken"
    assert said in found["found"]


def test_a_disk_that_fits_and_nothing_is_changed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pool"
    report = asked("--host-size", "1MiB", "--disk-path", folder, "--disk-size", "8MiB", status=0)
    disk = one(report, "pool", "disk")
    assert disk["figures"]["path"] == str(folder)
    assert disk["figures"]["free_bytes"] > 8 * MIB
    assert one(report, "pool", "direct I/O")["figures"]["direct"] in (True, False)
    assert list(tmp_path.iterdir()) == []
    report = asked("--disk-path", tmp_path, "--disk-size", "999TiB", status=1)
    assert "more than" in one(report, "pool", "disk")["found"]


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    """As a user without root's rights."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    words = ["doctor", "--quick", "--json", "--host-size", "1MiB", "--disk-size", "8MiB"]
    with Commands(tmp_path) as commands:
        done = commands.run([*words, "--disk-path", "closed"])
        other = commands.run([*words, "--disk-path", "open"])
    disk = one(json.loads(done.out), "pool", "disk")
    assert (done.status, disk["state"]) == (1, "broken")
    assert "closed is not writable for this user" in disk["found"]
    assert other.status == 0


def test_what_lies_on_disk_already(tmp_path: Path) -> None:
    """While a pool uses the folder, and afterwards."""
    config = PoolConfig(8 * MIB, DiskConfig(tmp_path, 16 * MIB))
    with Pool.open(config) as pool:
        fill(pool, 5)
        found = of_pool(config)
        assert found["disk"].figures["holder"] == str(os.getpid())
    before = {path.name for path in tmp_path.iterdir()}
    for each in (found, of_pool(config)):
        (stored,) = each["stored"].figures["namespaces"]  # type: ignore[misc]
        assert stored["blocks"] == 5
    assert {path.name for path in tmp_path.iterdir()} == before


def fill(pool: Pool, blocks: int) -> None:
    pool.register(NAMESPACE, 4096)
    keys = chain(NAMESPACE, blocks)
    Engine(pool, 4096).save(keys)
    assert pool.flush(keys, 60.0)


MOUNTS = {"/": "ext4", "/data": "xfs", "/data two": "tmpfs", "/data/share": "nfs4"}


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/none", "ext4"),
        ("/data", "xfs"),
        ("/database", "ext4"),
        ("/data/pool", "xfs"),
        ("/data two/x", "tmpfs"),
        ("/data/share/x", "ext3"),  # the last mount covers the first
    ],
)
def test_file_systems(folder: str, kind: str) -> None:
    mounts = [SimpleNamespace(mountpoint=at, fstype=of) for at, of in MOUNTS.items()]
    mounts.append(SimpleNamespace(mountpoint="/data/share", fstype="ext3"))
    assert file_system_of(Path(folder), mounts) == kind


def test_a_folder_in_memory_is_a_warning() -> None:
    (found, *_) = check_folder(DiskConfig(Path("/dev/shm/kvrecall-doctor"), 8 * MIB))
    assert (found.check, found.state) == ("file system", Health.WARNING)


def test_a_service(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    path = tmp_path / "run" / "pool.sock"
    (tmp_path / "engine.json").write_text(json.dumps({"backend": "service", "socket": str(path)}))
    words = ("--pool-config", tmp_path / "engine.json")
    service = ServiceThread(PoolConfig(MIB), path)
    found = one(asked(*words, status=0), "pool", "service")
    service.close()
    assert (found["state"], found["figures"]["pid"]) == ("ok", os.getpid())
    found = one(asked(*words, status=0), "pool", "service")
    assert found["state"] == "warning", "engines start without it"
    assert f"kvrecall pool serve --socket {path}" in found["cure"]


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text('{"host_size": "1GiB"}')
    settings, found = read_settings(tmp_path / "pool.json", {"host_size": "2MiB"})
    assert settings is not None
    assert (settings.pool.host_bytes, found.state) == (2 * MIB, Health.OK)


# -- the model ----------------------------------------------------------------------------------


def test_how_many_blocks_fit() -> None:
    """recall-tiny: 4 layers, 2 KV heads of 64, two bytes: 2 KiB a token."""
    report = asked(MODEL, "--host-size", "64MiB")
    layout = one(report, "model", "layout")["figures"]
    assert (layout["token_bytes"], layout["block_bytes"]) == (2048, 128 * 2048)
    host = one(report, "model", "host blocks")
    assert host["figures"] == {"tier": "host", "bytes": 64 * MIB, "blocks": 256, "tokens": 32768}
    assert host["state"] == "warning", "less than one sequence of the model"
    report = asked(MODEL, "--host-size", "128KiB", status=1)
    assert one(report, "model", "host blocks")["state"] == "broken", "no room for a block"


def test_a_model_of_several_kv_groups(tmp_path: Path) -> None:
    """What it caches, where a hit ends and what it needs; how many sessions' blocks fit."""
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_NEXT_80B))
    report = asked(tmp_path, "--host-size", "1MiB", status=1)
    layout = one(report, "model", "layout")
    assert (
        "4 KV groups: 3 of 12 layers (state; 12.6 MiB per block of 640 tokens), 1 of 12"
        in (layout["found"])
    )
    assert [g["kind"] for g in layout["figures"]["groups"]] == ["state"] * 3 + ["full"]
    hits = one(report, "model", "hits")
    assert hits["figures"] == {"unit_tokens": 16, "kinds": ["state", "full"]}
    assert "all blocks of full layers, the one state that ends there" in hits["found"]
    assert one(report, "model", "served")["state"] == "ok"
    assert one(report, "model", "host blocks")["state"] == "broken"


def test_a_model_of_the_hub_that_is_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--openai--gpt-oss-20b" / "snapshots" / "0a1b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configs.GPT_OSS_20B))
    report = asked("openai/gpt-oss-20b", "--host-size", "64MiB")
    assert one(report, "model", "hits")["figures"]["kinds"] == ["window", "full"]
    assert not [f for f in report["findings"] if f["check"] == "folder"]


def test_a_model_whose_layers_are_not_known(tmp_path: Path) -> None:
    strange = {**configs.QWEN3_8B, "layer_types": ["wavelet"] * 36}
    (tmp_path / "config.json").write_text(json.dumps(strange))
    layout = one(asked(tmp_path, "--host-size", "1MiB"), "model", "layout")
    assert layout["state"] == "note"
    assert "layers of type 'wavelet' are not known here" in layout["found"]


@pytest.mark.parametrize(
    ("model", "state"), [("/none", "broken"), (".", "broken"), ("Qwen/Qwen3-0.6B", "note")]
)
def test_other_models(
    model: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert one(asked(model), "model", "folder")["state"] == state


@pytest.mark.engine
def test_the_whole_with_the_engine() -> None:
    """vLLM is imported, and configured for a model with the pool."""
    pytest.importorskip("vllm")
    done = CliRunner().invoke(cli.app, ["--json", str(MODEL), "--host-size", "512MiB"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0, report
    assert one(report, "engine", "connector")["state"] == "ok"
    model = one(report, "engine", "model")["figures"]
    assert (model["architecture"], model["prefix_caching"]) == ("Qwen3ForCausalLM", True)
