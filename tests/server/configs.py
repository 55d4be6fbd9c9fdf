"""A valid config.json, for tests to modify."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_RIGHT: Json = {
    "Version": "1.0.0",
    "ServerConfig": {
        "ipAddress": "127.0.0.1",
        "port": 1025,
        "allowAllZeroIpListening": False,
        "maxLinkNum": 1000,
        "httpsEnabled": False,
    },
    "BackendConfig": {
        "kvPoolConfig": {"backend": "", "configPath": ""},
        "ModelDeployConfig": {
            "maxSeqLen": 2560,
            "maxInputTokenLen": 2048,
            "truncation": False,
            "ModelConfig": [
                {
                    "modelName": "m",
                    "modelWeightPath": "model",
                    "worldSize": 1,
                    "cpuMemSize": 0,
                    "npuMemSize": -1,
                    "plugin_params": '{"plugin_type":"prefix_cache"}',
                }
            ],
        },
        "ScheduleConfig": {},
    },
}


def right() -> Json:
    return copy.deepcopy(_RIGHT)


def _at(*path: Any) -> Callable[[Json], Json]:
    def part(config: Json) -> Json:
        for key in path:
            config = config[key]
        return config

    return part


_DEPLOY = ("BackendConfig", "ModelDeployConfig")
server, backend, deploy = _at("ServerConfig"), _at("BackendConfig"), _at(*_DEPLOY)
kv_pool, schedule = _at("BackendConfig", "kvPoolConfig"), _at("BackendConfig", "ScheduleConfig")
model = _at(*_DEPLOY, "ModelConfig", 0)


def write(folder: Path, config: Json, pool: Json | None = None) -> Path:
    """Writes config.json, a folder ``model`` and, if given, pool.json; returns config.json."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    if pool is not None:
        (folder / "pool.json").write_text(json.dumps(pool, indent=1))
        section = backend(config)["kvPoolConfig"]
        section |= {"backend": section.get("backend") or "embedded", "configPath": "pool.json"}
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=1))
    return path
