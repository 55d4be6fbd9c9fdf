"""``deploy/kubernetes`` under podman: a pool service and two engines in one pod.

Needs root, podman and its image: ``podman build -f deploy/Containerfile -t kvrecall .``
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distribution.test_deploy import DEPLOY, ROOT

pytestmark = [pytest.mark.long, pytest.mark.engine]
KEY = "containers-test-key"
POD = "kvrecall-one-pod-pod-0"
ENGINES = {"engine-1": 8001, "engine-2": 8002}
START_S = 600


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout + done.stderr


def manifest(shm: Path) -> str:
    """`one-pod.yaml` with the model of this repository, in sizes for a small machine.

    Podman gives an ``emptyDir`` the owner of the image's folder, Kubernetes opens it to all:
    /dev/shm is root's in the image, so the engines get a folder of the host there.
    """
    text = (DEPLOY / "kubernetes" / "one-pod.yaml").read_text()
    for word, small in (("32GiB", "256MiB"), ("200GiB", "1GiB"), ("Qwen/Qwen3-0.6B", "/model")):
        text = text.replace(word, small)
    settings, deployment = [
        one for one in yaml.safe_load_all(text) if one["kind"] != "NetworkPolicy"
    ]
    pod = deployment["spec"]["template"]["spec"]
    model = {"name": "model", "mountPath": "/model", "readOnly": True}
    for each in pod["containers"]:
        each["imagePullPolicy"] = "Never"
        each["resources"] = {"limits": {"memory": "2Gi" if each["name"] == "pool" else "6Gi"}}
        if each["name"] in ENGINES:
            each["volumeMounts"] = [*each["volumeMounts"], model]
            each["args"] += ["--", "--max-model-len=2048", "--enforce-eager"]
    pod["volumes"] = [one for one in pod["volumes"] if one["name"] != "shm"] + [
        {"name": "shm", "hostPath": {"path": str(shm), "type": "Directory"}},
        {
            "name": "model",
            "hostPath": {"path": str(ROOT / "models" / "recall-tiny"), "type": "Directory"},
        },
    ]
    return yaml.safe_dump_all([settings, deployment])


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if os.geteuid() != 0 or shutil.which("podman") is None:
        pytest.skip("needs root and podman")
    if subprocess.run(["podman", "image", "exists", "kvrecall"]).returncode != 0:
        pytest.skip("no image kvrecall: podman build -f deploy/Containerfile -t kvrecall .")
    folder = tmp_path_factory.mktemp("pod")
    shm = Path("/dev/shm") / folder.name
    shm.mkdir()
    shm.chmod(0o1777)
    secret, file = folder / "secret.json", folder / "pod.yaml"
    secret.write_text(json.dumps({"key": base64.b64encode(KEY.encode()).decode()}))
    file.write_text(manifest(shm))
    podman("secret", "create", "kvrecall-api-key", str(secret))
    try:
        podman("kube", "play", str(file))
        for port in ENGINES.values():
            wait_for(port)
        yield
    finally:
        podman("pod", "rm", "--force", POD, check=False)
        podman("secret", "rm", "kvrecall-api-key", check=False)
        shutil.rmtree(shm, ignore_errors=True)


def wait_for(port: int) -> None:
    for _ in range(START_S // 2):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            return
        except OSError:
            time.sleep(2)
    logs = "\n".join(podman("logs", "--tail=30", f"{POD}-{name}", check=False) for name in ENGINES)
    pytest.fail(f"no engine on port {port} in {START_S} s:\n{logs}")


def ask(port: int, prompt: str) -> tuple[str, int]:
    """The reply, and how many of the prompt's tokens were recalled."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        reply: dict[str, Any] = json.load(answer)
    details = reply["usage"]["prompt_tokens_details"] or {}
    return reply["choices"][0]["text"], details.get("cached_tokens") or 0


def test_engines_without_privileges_share_a_pool_and_outlive_it(pod: None) -> None:
    first, second = ENGINES.values()
    prompt = "Pools outlive the engines that fill them. " * 100
    text, recalled = ask(first, prompt)
    assert recalled == 0
    again = [ask(second, prompt) for _ in range(2)]
    assert [one for one, _ in again] == [text, text]
    assert again[1][1] > 0

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{first}/v1/models", timeout=10)

    podman("kill", f"{POD}-pool")
    assert ask(first, "Without a pool. " * 100)[0]
    podman("start", f"{POD}-pool", check=False)
    assert ask(second, prompt)[0] == text
