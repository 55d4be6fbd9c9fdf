"""``kvrecall serve --config``, the real thing: what the fields of a config.json do, over mutual
TLS, and how the server ends when its engine dies. The tests run in the order written."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import ran

from kvrecall.processes.ports import free_port
from server.configs import backend, deploy, model, right, schedule, server, write
from server.live import LiveServer, all_gone, browsing

pytest.importorskip("cryptography")

from server.certificates import Authority

pytestmark = pytest.mark.engine
LINKS = 12  # a browser opens up to 6


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    from kvrecall_lab.models import write_model

    folder = tmp_path_factory.mktemp("config")
    authority = Authority(folder, "ca")
    certificate, key, _ = authority.issue("server")
    mine, my_key, _ = authority.issue("client")
    operators = Authority(folder, "operators")
    operated, operated_key, _ = operators.issue("management")
    operator, operator_key, _ = operators.issue("operator")
    port, other, in_the_file = free_port(), free_port(), free_port()
    config = right()
    server(config).update(
        port=in_the_file,
        managementIpAddress="127.0.0.1",
        managementPort=other,
        metricsPort=other,
        managementTlsCert=operated.name,
        managementTlsPk=operated_key.name,
        managementTlsCaFile=["operators.pem"],
        maxLinkNum=LINKS,
        httpsEnabled=True,
        tlsCert=certificate.name,
        tlsPk=key.name,
        tlsCaPath=str(folder),
        tlsCaFile=["ca.pem"],
        maxRequestLength=1,
    )
    backend(config).update(npuDeviceIds=[[0]], interNodeTLSEnabled=False)
    deploy(config).update(maxSeqLen=4096, maxInputTokenLen=2500)
    model(config).update(npuMemSize=0.0625)
    model(config)["plugin_params"] = {
        "plugin_type": "prefix_cache,splitfuse,la",
        "num_speculative_tokens": 2,
    }
    schedule(config).update(maxIterTimes=8, maxBatchSize=8, enablePrefixCache=True)
    path = write(folder, config, {"host_size": "32MiB"})
    backend(config)["kvPoolConfig"] = json.dumps(backend(config)["kvPoolConfig"])
    path.write_text(json.dumps(config, indent=1))
    beside = ["--port", str(port), "--", "--max-num-seqs", "6"]
    write_model(folder / "model", "qwen3", hidden=64, layers=2, max_position=4096)
    context = ssl.create_default_context(cafile=str(authority.path))
    context.load_cert_chain(mine, my_key)
    management = ssl.create_default_context(cafile=str(operators.path))
    management.load_cert_chain(operator, operator_key)
    url = f"https://127.0.0.1:{other}"
    started = LiveServer(
        folder,
        ["--config", str(path), *beside],
        f"https://127.0.0.1:{port}",
        context,
        httpx.Client(base_url=url, timeout=60, verify=management),
        warm=True,
        environment={"VLLM_PLUGINS": "ascend_enhanced_model,ascend"},
    )
    try:
        started.wait_ready()
        yield started
    finally:
        started.close()


def test_what_has_no_effect_is_logged_once(live: LiveServer) -> None:
    lines = live.log.splitlines()
    (idle,) = (line for line in lines if "accepted without effect" in line)
    assert "BackendConfig.npuDeviceIds" in idle
    assert "BackendConfig.interNodeTLSEnabled" in idle
    assert "enablePrefixCache (retired: plugin_params" in idle
    assert sum("serving management+metrics on https://" in line for line in lines) == 1


def test_the_command_line_wins_over_the_file(live: LiveServer) -> None:
    """The server answers on its port, and vLLM has its batch size."""
    lines = live.log.splitlines()
    (wins,) = (line for line in lines if "the file is overridden by" in line)
    assert f"--port {httpx.URL(live.url).port} (file: " in wins
    assert "--max-num-seqs 6 (file: 8)" in wins
    assert live.management.get("/v1/config").json()["maxBatchSize"] == 6


def test_vllm_loads_kvrecalls_plugins_beside_those_named(live: LiveServer) -> None:
    (line,) = (x for x in live.log.splitlines() if "adds its own plug-ins" in x)
    assert "VLLM_PLUGINS is 'ascend_enhanced_model,ascend'" in line
    assert line.endswith("plug-ins seeds, waits, weights")


def test_planes_are_apart(live: LiveServer) -> None:
    """Each on its port, with its own certificates; a client of one is none of the other."""
    assert {each.get("/health").status_code for each in (live.client, live.management)} == {200}
    for path in ("/v2/health/ready", "/v1/config", "/metrics", "/metrics-json"):
        assert live.management.get(path).status_code == 200, path
        reply = live.client.get(path)
        assert (reply.status_code, reply.json()["error_type"]) == (404, "NotFoundError"), path
    for path in ("/generate", "/v1/completions", "/infer"):
        assert live.management.post(path, json={"inputs": "x"}).status_code == 404
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{live.management.base_url}/health", verify=live.verify)
    config = live.management.get("/v1/config").json()
    assert (config["modelName"], config["maxInputTokenLen"], config["maxOutputLen"]) == (
        "m",
        2500,
        8,
    )
    assert config["kvPool"]["host_size"] == "32MiB"


def test_curl_with_the_documented_calls(live: LiveServer) -> None:
    """MindIE's own example of Prefix Cache, word for word, but for the port: mutual TLS, and the
    second call finds the first one's question."""
    text = (Path(__file__).parent / "samples" / "prefix_cache_curl.txt").read_text()
    recalled = []
    for call in text.split("\n---\n"):
        call = call.replace("https://127.0.0.1:1025", f"-s -D headers {live.url}")
        done = ran("bash", "-c", call, cwd=live.folder, timeout=120)
        assert json.loads(done.stdout)["generated_text"], done.stderr
        headers = (live.folder / "headers").read_text()
        assert "200" in headers.splitlines()[0]
        found = re.search(r"^x-kvrecall: device=(\d+)", headers, re.MULTILINE)
        assert found
        recalled.append(int(found[1]))
    first, second = recalled
    assert (first, second) == (0, 640)  # 5 blocks of 128 of the 690 bytes the two have in common


def test_a_client_with_a_certificate(live: LiveServer) -> None:
    body = {"inputs": "Question: who? Answer:", "parameters": {"max_new_tokens": 512}}
    reply = live.client.post("/generate", json=body)
    assert reply.status_code == 200
    assert reply.json()["generated_text"]


def test_clients_without_one(live: LiveServer) -> None:
    for url in (live.url, str(live.management.base_url)):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")


def test_answers_are_capped(live: LiveServer) -> None:
    body: dict[str, Any] = {"inputs": "x", "parameters": {"max_new_tokens": 99, "details": True}}
    details = live.client.post("/generate", json=body).json()["details"]
    assert details["generated_tokens"] <= 8
    asked = {"model": "m", "prompt": "x", "max_tokens": 99, "ignore_eos": True}
    usage = live.client.post("/v1/completions", json=asked).json()["usage"]
    assert usage["completion_tokens"] == 8


def test_long_prompts_are_refused(live: LiveServer) -> None:
    reply = live.client.post("/generate", json={"inputs": "x" * 2501})
    assert reply.status_code == 422
    assert "2501 tokens; maxInputTokenLen allows 2500" in reply.json()["error"]
    reply = live.client.post("/v1/completions", json={"model": "m", "prompt": "x" * 2501})
    assert reply.status_code == 400
    assert "maxInputTokenLen allows 2500" in reply.json()["error"]["message"]
    message = [{"role": "user", "content": "x" * 2501}]
    reply = live.client.post("/v1/chat/completions", json={"model": "m", "messages": message})
    assert reply.status_code == 400


def test_recall_with_speculation(live: LiveServer) -> None:
    text = "0123456789" * 28
    body = {"inputs": text, "parameters": {"details": True}}
    live.client.post("/generate", json=body)
    assert live.client.post("/reset_prefix_cache").status_code == 200
    recall = live.client.post("/generate", json=body).json()["details"]["recall"]
    assert recall["host"] == 256
    assert recall["computed"] == 24


def test_the_dashboard_on_a_plane_of_its_own(live: LiveServer) -> None:
    """A real browser, with the operator's certificate; on the business plane there is none."""
    assert live.client.get("/dashboard").status_code == 404
    with browsing() as chromium, chromium.new_context(**operator(live)) as context:
        tab = context.new_page()
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(f"{origin(live)}/dashboard")
        tab.wait_for_selector("#status[data-state=live]", timeout=60_000)
        live.client.post("/generate", json={"inputs": "x" * 300})
        tab.wait_for_selector("#requests tbody tr", timeout=60_000)
        tab.wait_for_selector("#tree .row.group", timeout=60_000)
        assert tab.inner_text("#model") == "m"
        assert tab.locator("#tiers .meter").count() == 2
        assert wrong == []


def origin(live: LiveServer) -> str:
    return str(live.management.base_url).rstrip("/")


def operator(live: LiveServer) -> dict[str, Any]:
    """A browser context with the management plane's certificate."""
    mine = {
        "origin": origin(live),
        "certPath": str(live.folder / "operator.pem"),
        "keyPath": str(live.folder / "operator.key.pem"),
    }
    return {"client_certificates": [mine], "ignore_https_errors": True}


def test_body_too_large(live: LiveServer) -> None:
    reply = live.client.post("/generate", content=b" " * ((1 << 20) + 1))
    assert reply.status_code == 413
    assert "larger than 1 MB" in reply.json()["error"]


def test_silent_connections_end(live: LiveServer) -> None:
    """More of them than requests are allowed: before their handshake, after it, and with half a
    head. The others are answered meanwhile."""
    address = (live.client.base_url.host, live.client.base_url.port)
    with contextlib.ExitStack() as kept:
        links: list[socket.socket] = []
        for number in range(3 * LINKS):
            link = kept.enter_context(socket.create_connection(address))
            if number % 3:
                link = live.verify.wrap_socket(link, server_hostname=address[0])
                kept.enter_context(link)
            if number % 3 == 2:
                link.sendall(b"POST /generate HTTP/1.1\r\nHost: ")
            links.append(link)
        assert live.client.get("/v1/models").status_code == 200
        assert live.management.get("/health").status_code == 200
        for link in links:
            link.settimeout(60)
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert link.recv(1) == b""


def test_a_dead_worker_ends_the_server(live: LiveServer) -> None:
    """With its engine, whose own death is tested in test_dashboard.py."""
    family = live.family()
    live.worker().kill()
    assert live.wait_end() == 1
    assert "[kvrecall] the engine died" in live.log
    assert all_gone(family)
