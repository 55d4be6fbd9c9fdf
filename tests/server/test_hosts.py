"""The documents' example of several hosts, on one machine: one config.json with dp 2 and a mixture
of experts, an API process on each host (here: loopback address), joined by vLLM's own options.

They start and join. vLLM 0.32 cannot compute with them on a CPU, whose communicator has no
``all_gatherv``; replicas that compute and share a pool are in test_replicas.py."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvrecall.processes.ports import free_port
from server.configs import backend, model, right, schedule, server, write
from server.live import KVRECALL, LiveServer

pytestmark = [pytest.mark.engine, pytest.mark.long]

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvrecall_lab.models import write_model

    folder = tmp_path_factory.mktemp("hosts")
    config = right()
    server(config).update(port=free_port(), managementPort=free_port(), metricsPort=free_port())
    server(config)["managementIpAddress"] = None  # each host's own
    backend(config).update(multiNodesInferEnabled=True, multiNodesInferPort=1120)
    model(config).update(
        dp=2, tp=1, worldSize=1, moe_ep=4, moe_tp=4, cpuMemSize=5, npuMemSize=0.0625
    )
    schedule(config).update(maxBatchSize=8, maxIterTimes=64)
    path = write(folder, config)
    pool = {"backend": "service", "configPath": "pool.json", "asyncWrite": False}
    backend(config)["kvPoolConfig"] = json.dumps(pool)  # a string, as the documents' tables say
    path.write_text(json.dumps(config, indent=1))
    settings = {"socket": f"{folder}/pool/pool.sock", "load_or_compute": "load"}
    (folder / "pool.json").write_text(json.dumps(settings))
    write_model(folder / "model", "qwen3_moe", hidden=64, layers=2, max_position=4096)
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[LiveServer]]:
    config = json.loads((folder / "config.json").read_text())
    ports = config["ServerConfig"]
    words = ["--data-parallel-address", HOSTS[0], "--data-parallel-rpc-port", str(free_port())]
    service = subprocess.Popen(
        [KVRECALL, "pool", "serve", "--socket", f"{folder}/pool/pool.sock", "--host-size", "64MiB"],
        start_new_session=True,
    )
    started: list[LiveServer] = []
    try:
        for rank, host in enumerate(HOSTS):
            (folder / host).mkdir()
            given = ["--config", str(folder / "config.json"), "--host", host, "--"]
            given += ["--data-parallel-rank", str(rank), *words]
            url, plane = (f"http://{host}:{ports[x]}" for x in ("port", "managementPort"))
            management = httpx.Client(base_url=plane, timeout=60)
            started.append(LiveServer(folder / host, given, url, management=management))
        for live in started:
            live.wait_ready()
        yield started
    finally:
        for live in started:
            live.close()
        service.terminate()
        service.wait()


def test_each_process_is_one_replica(servers: list[LiveServer]) -> None:
    for rank, live in enumerate(servers):
        assert len(live.named("VLLM::EngineCor")) == 1
        wins = (
            f"--host {HOSTS[rank]} (file: 127.0.0.1), --data-parallel-rank {rank} (file: nothing)"
        )
        assert wins in live.log
        assert "worldSize is 1 on this host; in all tp x pp x dp is 1 x 1 x 2 = 2" in live.log
        assert "cpuMemSize 5 is without effect" in live.log
        assert "moe_ep 4: expert parallelism is on" in live.log
        assert "multiNodesInferEnabled: this server" not in live.log
