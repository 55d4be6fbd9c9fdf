"""What the OpenAPI description allows, and much that it does not, never ends in a server error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .live import LiveServer

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("schemathesis")

BUSINESS = "generate|generate_stream|infer|infer_token|v1/[a-z/]+|v2.*|tokenize|detokenize"
MANAGEMENT = "health.*|info|metrics.*|version|load"
BUDGET_S = 30
SKIPPED = "derender|v1/systemone"  # vLLM's own experiments


def description(tiny: LiveServer) -> str:
    """What the server says of itself, with its own model in the paths instead of any."""
    told = tiny.client.get("/openapi.json").json()
    paths = {}
    for path, operations in told["paths"].items():
        for operation in operations.values():
            parameters = operation.get("parameters", [])
            operation["parameters"] = [p for p in parameters if p["name"] != "model"]
        paths[path.replace("{model}", "tiny")] = operations
    return json.dumps(told | {"paths": paths})


def test_no_server_errors(tiny: LiveServer) -> None:
    command = Path(sys.executable).parent / "schemathesis"
    file = tiny.folder / "openapi.json"
    file.write_text(description(tiny))
    done = subprocess.run(
        [
            command,
            "run",
            file,
            f"--url={tiny.url}",
            "--checks=not_a_server_error",
            f"--include-path-regex=^/({BUSINESS}|{MANAGEMENT})?$",
            f"--exclude-path-regex={SKIPPED}",
            "--phases=fuzzing",
            "--max-examples=10",
            f"--max-time={BUDGET_S}",
            "--seed=1",
            "--request-timeout=120",
            "--suppress-health-check=all",
            "--no-shrink",
            "--no-color",
        ],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tiny.folder,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases, done.stdout[-2000:]
    assert int(cases[1]) > 20
    assert tiny.client.get("/health").status_code == 200
