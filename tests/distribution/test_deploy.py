"""``deploy/``: the container files, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrecall.config import RecallSettings
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall_lab.reference.commands import commands

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {
    name: service
    for name, service in SERVICES.items()
    if service["image"] == "kvrecall" and "entrypoint" not in service
}
ENGINES = {name: service for name, service in OURS.items() if service["command"][0] == "serve"}


def words(service: dict[str, Any]) -> list[str]:
    """A command's words, with the defaults of shell variables."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(word)) for word in service["command"]]


def parsed(service: dict[str, Any]) -> dict[str, Any]:
    """The options that kvrecall's own command line reads from a service's command."""
    left = words(service)
    name, known = f"kvrecall {left.pop(0)}", dict(commands())
    while name not in known:
        name += f" {left.pop(0)}"
    options: dict[str, Any] = known[name].make_context(name, left).params
    return options


def binds(service: dict[str, Any]) -> dict[str, Path]:
    """Where files of the repository are mounted in a service, and which."""
    found = {}
    for each in service.get("volumes", []):
        source, target, *_ = each.split(":")
        if source.startswith("."):
            found[target] = (DEPLOY / source).resolve()
    return found


@pytest.mark.parametrize("name", OURS)
def test_commands_exist_and_take_their_options(name: str) -> None:
    assert parsed(OURS[name])


def test_there_is_what_was_promised() -> None:
    assert len(ENGINES) == 2
    assert {"pool", "master", "prometheus", "grafana"} <= set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_is_there(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("depends_on", [])) <= set(SERVICES)
    networks = service.get("networks", [])
    assert set(networks) <= set(COMPOSE["networks"])
    for path in binds(service).values():
        assert path.is_file(), path
    volumes = {each.split(":")[0] for each in service.get("volumes", [])}
    assert {each for each in volumes if not each.startswith(".")} <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", ENGINES)
def test_engines_find_the_service(name: str) -> None:
    """One socket in one volume, one PID namespace, and the service's settings are what it takes."""
    engine, pool = ENGINES[name], SERVICES["pool"]
    settings = json.loads(binds(pool)[str(parsed(pool)["config"])].read_text())
    assert parsed(engine)["pool_socket"] == settings["socket"]
    folder = str(Path(settings["socket"]).parent)
    mounts = [f"run:{folder}" in each["volumes"] for each in (engine, pool)]
    assert mounts == [True, True]
    assert engine["shm_size"] == "2gb"  # vLLM needs more than a container's 64 MiB
    owner = engine["pid"].removeprefix("service:")
    assert engine["pid"] == pool["pid"]
    assert owner not in (name, "pool")  # whose end would be that of all processes in it
    assert owner in SERVICES


def test_the_settings_of_the_service_are_read() -> None:
    raw = json.loads((DEPLOY / "pool.json").read_text())
    raw.pop("socket")
    settings = RecallSettings.from_mapping(raw, "pool.json")
    assert settings.pool.disk is not None
    assert f"blocks:{settings.pool.disk.path}" in SERVICES["pool"]["volumes"]
    assert settings.pool.remote is not None
    options = {key: value for key, value in raw["remote"].items() if key != "kind"}
    assert MooncakeSettings.of(options)
    master = parsed(SERVICES["master"])
    assert options["master_server_address"] == f"master:{master['port']}"
    assert options["local_hostname"] == "pool"
    assert set(SERVICES["pool"]["networks"]) & set(SERVICES["master"]["networks"]) == {"store"}
    assert COMPOSE["networks"]["store"] == {"internal": True}


def port_of(engine: dict[str, Any], plane: str) -> int:
    """The port of a plane of its own."""
    return int(str(parsed(engine)[plane]).rpartition(":")[2])


def networks_of(name: str) -> set[str]:
    return set(SERVICES[name].get("networks", []))


def test_clients_need_a_key_and_planes_are_apart() -> None:
    for engine in ENGINES.values():
        options = parsed(engine)
        assert not options["allow_unauthenticated"]
        assert engine["environment"]["VLLM_API_KEY"].startswith("${API_KEY:?")
        ports = {options["port"], port_of(engine, "management"), port_of(engine, "metrics")}
        assert len(ports) == 3


def test_only_the_pool_reaches_the_master() -> None:
    """Whoever reaches it can read and change all that is stored."""
    reach = {name for name in SERVICES if networks_of(name) & networks_of("master")}
    assert reach == {"master", "pool"}
    assert "ports" not in SERVICES["master"]


def test_published_ports_are_listened_on() -> None:
    listened = {
        name: {parsed(engine)["port"], port_of(engine, "management")}
        for name, engine in ENGINES.items()
    }
    for engine in ENGINES.values():
        assert f":{parsed(engine)['port']}/health" in engine["healthcheck"]["test"][-1]
    listened |= {"prometheus": {9090}, "grafana": {3000}}
    published = []
    for name, service in SERVICES.items():
        for each in service.get("ports", []):
            address, outside, inside = each.split(":")
            assert address == "127.0.0.1"
            assert int(inside) in listened[name]
            published.append(outside)
    assert len(set(published)) == len(published) == 6


def test_prometheus_scrapes_what_is_there() -> None:
    config = yaml.safe_load(
        binds(SERVICES["prometheus"])["/etc/prometheus/prometheus.yml"].read_text()
    )
    assert set(config) <= {"global", "rule_files", "scrape_configs"}
    served = {f"{name}:{port_of(engine, 'metrics')}" for name, engine in ENGINES.items()}
    targets = [
        target
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]
    assert sorted(targets) == sorted(served)
    assert len({job["job_name"] for job in config["scrape_configs"]}) == 1
    for target in targets:
        service = SERVICES[target.split(":")[0]]
        assert set(service["networks"]) & set(SERVICES["prometheus"]["networks"]), target


def test_grafana_finds_source_and_dashboard() -> None:
    mounted = binds(SERVICES["grafana"])
    (source,) = yaml.safe_load(
        mounted["/etc/grafana/provisioning/datasources/kvrecall.yaml"].read_text()
    )["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load(
        mounted["/etc/grafana/provisioning/dashboards/kvrecall.yaml"].read_text()
    )["providers"]
    dashboards = {
        target: path
        for target, path in mounted.items()
        if target.startswith(provider["options"]["path"] + "/")
    }
    ((target, path),) = dashboards.items()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == target
    assert json.loads(path.read_text())["panels"]


def test_the_container_file() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and line[0] not in "# "]
    assert steps[0][0] == "FROM"
    for name, rest in steps:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = re.findall(r"EXTRAS=([\w,-]+)", text)
    assert len(given) == 2
    for extras in given:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert project["readme"] in text  # what building the wheel reads
    assert all(name in text for name in project["license-files"])
    assert [rest for name, rest in steps if name == "USER"] == ["kvrecall"]
    assert steps[-1] == ["ENTRYPOINT", '["kvrecall"]']
    folders = {each.split(":")[1] for s in OURS.values() for each in s.get("volumes", [])}
    for folder in folders - {"/etc/kvrecall/pool.json"}:
        assert folder in text, folder  # made by the image, with its owner
