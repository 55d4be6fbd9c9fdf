"""``deploy/systemd``: units that systemd accepts, with commands that kvrecall accepts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from distribution.test_deploy import DEPLOY, parsed

FOLDER = DEPLOY / "systemd"
PROGRAM = "/opt/kvrecall/bin/kvrecall"
UNITS = sorted(FOLDER.glob("*.service"))
ENVIRONMENT = {
    "MODEL": "/srv/models/m",
    "PORT": "8001",
    "MANAGEMENT": "127.0.0.1:8101",
    "METRICS": "127.0.0.1:9101",
    "OPTIONS": "--served-model-name=m",
}

SERVE = "kvrecall-serve@.service"
POOL = "kvrecall-pool.service"


def unit(name: str) -> dict[str, list[str]]:
    """Its settings, each with the values that it is given."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line and line[0] not in "#[":
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def words(name: str) -> list[str]:
    """Of its command, as systemd makes them of the variables."""
    (line,) = unit(name)["ExecStart"]
    filled = re.sub(r"\$\{?(\w+)\}?", lambda one: ENVIRONMENT[one[1]], line)
    program, *rest = shlex.split(filled)
    assert program == PROGRAM
    return rest


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_a_unit(path: Path, tmp_path: Path) -> None:
    """By ``systemd-analyze verify``, with another program, because it looks for the unit's."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze; scripts/setup brings it")
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    done = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_its_command_exists_and_takes_its_options(path: Path) -> None:
    assert parsed({"command": words(path.name)})


def test_the_variables_are_the_documented_ones() -> None:
    (line,) = unit(SERVE)["ExecStart"]
    text = (FOLDER / SERVE).read_text()
    assert set(re.findall(r"\$\{?(\w+)", line)) == set(re.findall(r"^#   (\w+)=", text, re.M))


def test_engines_share_user_and_socket_with_the_service() -> None:
    pool, serve = unit(POOL), unit(SERVE)
    assert pool["User"] == serve["User"] == ["kvrecall"]
    folder = f"/run/{pool['RuntimeDirectory'][0]}"
    assert parsed({"command": words(SERVE)})["pool_socket"] == f"{folder}/pool.sock"
    assert POOL in serve["Wants"][0].split()
    assert "kvrecall" in (FOLDER / "kvrecall.sysusers.conf").read_text()


def test_an_engine_wants_a_key_and_serves_its_planes_apart() -> None:
    options = parsed({"command": words(SERVE)})
    assert str(options["api_key_file"]) == "/etc/kvrecall/api-key"
    assert f"# {options['api_key_file']} holds" in (FOLDER / SERVE).read_text()
    assert options["host"] is None, "127.0.0.1 then"
    assert options["management"] != options["metrics"]
    assert not options["allow_unauthenticated"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_no_sandbox_hides_the_arena(path: Path) -> None:
    """It is mapped through /proc/PID/fd by processes of other units."""
    given = unit(path.name)
    assert not {"PrivateUsers", "PrivatePIDs", "ProcSubset", "ProtectProc"} & set(given)
    assert given["NoNewPrivileges"] == ["yes"]
