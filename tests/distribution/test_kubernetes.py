"""``deploy/kubernetes``: against Kubernetes' own schemas, and the options of the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from distribution.test_deploy import DEPLOY, parsed
from kvrecall.config import RecallSettings, parse_size
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings

FOLDER = DEPLOY / "kubernetes"
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes-1.34.json").read_text())
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
ONE_POD = "one-pod.yaml"
FILES = (*KUSTOMIZATION["resources"], ONE_POD)


def objects(*files: str) -> list[dict[str, Any]]:
    return [each for file in files for each in yaml.safe_load_all((FOLDER / file).read_text())]


ALL = objects(*FILES)


def named(each: dict[str, Any]) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def the(kind: str, name: str) -> dict[str, Any]:
    (found,) = (x for x in ALL if (x["kind"], x["metadata"]["name"]) == (kind, name))
    return found


def pods() -> dict[str, dict[str, Any]]:
    """The pods' specifications, by what makes them."""
    return {named(x): x["spec"]["template"]["spec"] for x in ALL if "template" in x.get("spec", {})}


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, pod in pods().items():
        for container in pod["containers"]:
            yield f"{name} {container['name']}", pod, container


RUNNING = [pytest.param(pod, each, id=name) for name, pod, each in containers()]


def words(container: dict[str, Any]) -> dict[str, Any]:
    return {"command": container["args"]}


def settings_of(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(the("ConfigMap", name)["data"]["pool.json"])
    return settings


def test_every_file_is_applied_or_stands_alone() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == {*FILES, "kustomization.yaml"}
    assert KUSTOMIZATION["kind"] == "Kustomization"
    assert the("Namespace", KUSTOMIZATION["namespace"])


@pytest.mark.parametrize("each", [x for x in ALL if x["kind"] != "ServiceMonitor"], ids=named)
def test_an_object_is_valid(each: dict[str, Any]) -> None:
    schema = {"$ref": f"#/$defs/{SCHEMAS['kinds'][each['kind']]}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(each)


@pytest.mark.parametrize(("pod", "container"), RUNNING)
def test_what_a_container_names_is_there(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert parsed(words(container))
    volumes = {each["name"] for each in pod.get("volumes", [])}
    assert {each["name"] for each in container.get("volumeMounts", [])} <= volumes
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    assert parsed(words(container)).get("port") in (*ports.values(), None)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        how = container.get(probe, {})
        asked = how.get("httpGet") or how.get("tcpSocket")
        assert asked is None or asked["port"] in ports
        if "exec" in how:
            assert parsed({"command": how["exec"]["command"][1:]})


@pytest.mark.parametrize(("pod", "container"), RUNNING)
def test_containers_have_no_privileges(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Of one set of capabilities, too: a process maps another's arena only with all it has."""
    merged = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert merged["runAsUser"] == 1000
    assert merged["runAsNonRoot"] is True
    assert merged["allowPrivilegeEscalation"] is False
    assert merged["capabilities"] == {"drop": ["ALL"]}
    assert merged["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_pods_share_what_the_arena_needs() -> None:
    """Engines map it through /proc/PID/fd: one PID namespace, one user, one socket."""
    pool, engine = pods()["DaemonSet kvrecall-pool"], pods()["Deployment kvrecall-engine"]
    assert pool["hostPID"] is engine["hostPID"] is True
    assert pool["nodeSelector"] == engine["nodeSelector"]
    run = [next(v for v in pod["volumes"] if v["name"] == "run") for pod in (pool, engine)]
    assert run[0] == run[1]
    options = parsed(words(engine["containers"][0]))
    assert options["pool_socket"] == settings_of("kvrecall-pool")["socket"]


def test_one_pod_shares_it_without_privileges() -> None:
    pod = pods()["Deployment kvrecall-one-pod"]
    assert pod["shareProcessNamespace"] is True
    assert not {"hostPID", "hostNetwork", "hostIPC"} & set(pod)
    assert all("hostPath" not in volume for volume in pod["volumes"])
    settings = settings_of("kvrecall-one-pod")
    engines = [c for c in pod["containers"] if c["args"][0] == "serve"]
    assert {parsed(words(c))["pool_socket"] for c in engines} == {settings["socket"]}
    assert len({parsed(words(c))["port"] for c in engines}) == len(engines) == 2
    # A volume belongs to root and others may enter it; the pool wants folders of its own.
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert not {str(Path(settings["socket"]).parent), settings["disk_path"]} & mounts


@pytest.mark.parametrize("name", ["kvrecall-pool", "kvrecall-one-pod"])
def test_the_pools_settings_fit_their_pod(name: str) -> None:
    raw = settings_of(name)
    mounted = [raw.pop("socket"), raw["disk_path"]]
    settings = RecallSettings.from_mapping(raw, "pool.json")
    (pod,) = (x for key, x in pods().items() if key.endswith(f" {name}"))
    pool = next(c for c in pod["containers"] if c["name"] == "pool")
    needed = settings.pool.host_bytes
    if settings.pool.remote is not None:
        options = {key: value for key, value in raw["remote"].items() if key != "kind"}
        assert MooncakeSettings.of(options)
        needed += sum(
            parse_size(options[size], size) for size in ("global_segment_size", "local_buffer_size")
        )
    limit = parse_size(pool["resources"]["limits"]["memory"] + "B", "memory")
    assert needed + (1 << 30) <= limit
    mounts = [mount["mountPath"] for mount in pool["volumeMounts"]]
    assert all(any(path.startswith(f"{mount}/") or path == mount for mount in mounts)
               for path in mounted)  # fmt: skip


def test_pools_find_the_master() -> None:
    remote = settings_of("kvrecall-pool")["remote"]
    service = the("Service", "mooncake-master")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert remote["master_server_address"] == f"{service['metadata']['name']}:{ports['rpc']}"
    (container,) = pods()["Deployment mooncake-master"]["containers"]
    options = parsed(words(container))
    assert (options["port"], options["metrics_port"]) == (ports["rpc"], ports["metrics"])
    prepare = pods()["DaemonSet kvrecall-pool"]["initContainers"][0]
    assert remote["local_hostname"] == "POD_IP" == prepare["env"][0]["name"]
    assert "s/POD_IP/$POD_IP/" in prepare["command"][-1]


ENGINES = ["Deployment kvrecall-engine", "Deployment kvrecall-one-pod"]


@pytest.mark.parametrize("name", ENGINES)
def test_clients_need_a_key_and_planes_are_apart(name: str) -> None:
    """Only clients reach the API, only Prometheus the metrics, and no other pod the rest."""
    api, metrics = set(), set()
    for container in pods()[name]["containers"]:
        if container["args"][0] != "serve":
            continue
        options = parsed(words(container))
        assert not options["allow_unauthenticated"]
        (key,) = (each for each in container["env"] if each["name"] == "VLLM_API_KEY")
        secret = key["valueFrom"]["secretKeyRef"]
        text = (FOLDER / (ONE_POD if "one-pod" in name else "kustomization.yaml")).read_text()
        assert f"create secret generic {secret['name']} " in text
        assert f"--from-literal={secret['key']}=" in text
        assert options["management"].startswith("127.0.0.1:")
        api.add(options["port"])
        metrics.add(int(options["metrics"].rpartition(":")[2]))
        assert {port["containerPort"] for port in container["ports"]} <= api | metrics
    clients, watchers = the("NetworkPolicy", name.split()[1])["spec"]["ingress"]
    assert {port["port"] for port in clients["ports"]} == api
    assert clients["from"] == [{"podSelector": {"matchLabels": {"kvrecall/client": "true"}}}]
    assert {port["port"] for port in watchers["ports"]} == metrics
    (watcher,) = watchers["from"]
    assert watcher["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}


def test_selectors_select() -> None:
    """Services, budgets, policies and monitors mean the pods or services they are written for."""
    templates = (x["spec"]["template"] for x in ALL if "template" in x.get("spec", {}))
    labels = [template["metadata"]["labels"] for template in templates]
    for each in ALL:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            wanted, among = spec["selector"], labels
        elif each["kind"] == "ServiceMonitor":
            wanted = spec["selector"]["matchLabels"]
            among = [x["metadata"]["labels"] for x in ALL if x["kind"] == "Service"]
        elif "podSelector" in spec or "selector" in spec:
            wanted, among = spec.get("selector", spec.get("podSelector"))["matchLabels"], labels
        else:
            continue
        assert sum(wanted.items() <= found.items() for found in among) == 1, named(each)


@pytest.mark.parametrize("each", [x for x in ALL if x["kind"] == "ServiceMonitor"], ids=named)
def test_a_monitor_scrapes_a_named_port(each: dict[str, Any]) -> None:
    """The schema of this kind comes with the operator."""
    assert each["apiVersion"] == "monitoring.coreos.com/v1"
    wanted = each["spec"]["selector"]["matchLabels"].items()
    services = (x for x in ALL if x["kind"] == "Service")
    (service,) = (x for x in services if wanted <= x["metadata"]["labels"].items())
    ports = {port["name"] for port in service["spec"]["ports"]}
    for endpoint in each["spec"]["endpoints"]:
        assert endpoint["port"] in ports
        assert endpoint["path"].startswith("/")
        assert endpoint["interval"].removesuffix("s").isdigit()
