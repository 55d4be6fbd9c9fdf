"""``deploy/kubernetes`` under podman: a pool service and two engines, in one pod and apart.

Needs root, podman and its image: ``podman build -f deploy/Containerfile -t kvrecall .``
"""

from __future__ import annotations

import base64
import copy
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
ONE_POD = {"engine-1": 8001, "engine-2": 8002}
NODE = {"kvrecall-engine-1": 8011, "kvrecall-engine-2": 8012}
START_S = 600
CONF = Path("/etc/containers/containers.conf")


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout + done.stderr


def read(name: str) -> list[dict[str, Any]]:
    """What podman takes of a manifest, in sizes for a small machine."""
    text = (DEPLOY / "kubernetes" / name).read_text()
    for word, small in (("32GiB", "256MiB"), ("200GiB", "1GiB"), ("Qwen/Qwen3-0.6B", "/model")):
        text = text.replace(word, small)
    kinds = ("ConfigMap", "Deployment", "DaemonSet")
    return [one for one in yaml.safe_load_all(text) if one["kind"] in kinds]


def adapt(pod: dict[str, Any], shm: Path) -> None:
    """To podman, and to the model of this repository. Podman gives an ``emptyDir`` the owner of the
    image's folder, Kubernetes opens it to all: /dev/shm is root's in the image, so the engines get
    a folder of the host there."""
    model = {"name": "model", "mountPath": "/model", "readOnly": True}
    for each in (*pod["containers"], *pod.get("initContainers", ())):
        each["imagePullPolicy"] = "Never"
        is_engine = "engine" in each["name"]
        each["resources"] = {"limits": {"memory": "6Gi" if is_engine else "2Gi"}}
        if is_engine:
            each["volumeMounts"] = [*each["volumeMounts"], model]
            each["args"] = [*each["args"], "--", "--max-model-len=2048", "--enforce-eager"]
    pod["volumes"] = [one for one in pod["volumes"] if one["name"] != "shm"] + [
        {"name": "shm", "hostPath": {"path": str(shm), "type": "Directory"}},
        {
            "name": "model",
            "hostPath": {"path": str(ROOT / "models" / "recall-tiny"), "type": "Directory"},
        },
    ]


def one_pod(folder: Path, shm: Path) -> list[dict[str, Any]]:
    settings, deployment = read("one-pod.yaml")
    adapt(deployment["spec"]["template"]["spec"], shm)
    return [settings, deployment]


def node(folder: Path, shm: Path) -> list[dict[str, Any]]:
    """`pool.yaml` and two of `engines.yaml`, each a pod of its own in the host's PID namespace.
    Podman has no DaemonSets, no replicas and no pods' addresses; without Mooncake."""
    settings, pool = read("pool.yaml")
    whole = json.loads(settings["data"]["pool.json"])
    del whole["remote"]
    settings["data"]["pool.json"] = json.dumps(whole)
    (engine,) = read("engines.yaml")
    pods = {"kvrecall-pool": pool} | {name: copy.deepcopy(engine) for name in NODE}
    for name, each in pods.items():
        spec = each["spec"]["template"]["spec"]
        adapt(spec, shm)
        for volume in spec["volumes"]:
            if "type" in volume.get("hostPath", {}) and volume["name"] in ("run", "blocks"):
                volume["hostPath"]["path"] = str(folder / volume["name"])
        for init in spec.get("initContainers", ()):
            init["env"] = [{"name": "POD_IP", "value": "127.0.0.1"}]
        if name in NODE:
            spec["containers"][0]["ports"] = [{"containerPort": 8000, "hostPort": NODE[name]}]
        del spec["nodeSelector"]
        kept = {"io.podman.annotations.init.container.type": "always"}  # 4.3 removes running ones
        facts = {"name": name, "annotations": kept}
        pods[name] = {"apiVersion": "v1", "kind": "Pod", "metadata": facts, "spec": spec}
    return [settings, *pods.values()]


@pytest.fixture(params=["one-pod", "node"])
def pool(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[str, dict[str, int]]]:
    """The container of the pool service, and the ports of engines by container."""
    if os.geteuid() != 0 or shutil.which("podman") is None:
        pytest.skip("needs root and podman")
    if subprocess.run(["podman", "image", "exists", "kvrecall"]).returncode != 0:
        pytest.skip("no image kvrecall: podman build -f deploy/Containerfile -t kvrecall .")
    folder = tmp_path_factory.mktemp("pod")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)  # the pods' user goes through them
    shm = Path("/dev/shm") / folder.name
    shm.mkdir()
    shm.chmod(0o1777)
    secret, file = folder / "secret.json", folder / "pods.yaml"
    secret.write_text(json.dumps({"key": base64.b64encode(KEY.encode()).decode()}))
    is_one = request.param == "one-pod"
    manifests = (one_pod if is_one else node)(folder, shm)
    if not is_one:  # podman 4.3 passes over hostPID; this is its own word for that
        mine = folder / "containers.conf"
        mine.write_text(
            f'{CONF.read_text() if CONF.exists() else ""}[containers]\npidns = "host"\n'
        )
        monkeypatch.setenv("CONTAINERS_CONF", str(mine))
    file.write_text(yaml.safe_dump_all(manifests))
    podman("secret", "create", "kvrecall-api-key", str(secret))
    try:
        podman("kube", "play", str(file))
        names = {f"kvrecall-one-pod-pod-0-{name}": port for name, port in ONE_POD.items()}
        names = names if is_one else {f"{name}-engine": port for name, port in NODE.items()}
        for name, port in names.items():
            wait_for(name, port)
        yield "kvrecall-one-pod-pod-0-pool" if is_one else "kvrecall-pool-pool", names
    finally:
        pods = ["kvrecall-one-pod-pod-0"] if is_one else ["kvrecall-pool", *NODE]
        podman("pod", "rm", "--force", *pods, check=False)
        podman("secret", "rm", "kvrecall-api-key", check=False)
        shutil.rmtree(shm, ignore_errors=True)


def wait_for(name: str, port: int) -> None:
    for _ in range(START_S // 2):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            return
        except OSError:
            time.sleep(2)
    logs = podman("logs", "--tail=30", name, check=False)
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


def test_engines_share_a_pool_and_outlive_it(pool: tuple[str, dict[str, int]]) -> None:
    service, engines = pool
    first, second = engines.values()
    prompt = "Pools outlive the engines that fill them. " * 100
    text, recalled = ask(first, prompt)
    assert recalled == 0
    again = [ask(second, prompt) for _ in range(2)]
    assert [one for one, _ in again] == [text, text]
    assert again[1][1] > 0

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{first}/v1/models", timeout=10)

    podman("kill", service)
    assert ask(first, "Without a pool. " * 100)[0]
    podman("start", service, check=False)
    assert ask(second, prompt)[0] == text
