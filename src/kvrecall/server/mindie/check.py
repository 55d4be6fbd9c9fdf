"""What ``kvrecall config check`` and ``config example`` print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrecall.errors import ExitStatus, KvrecallError
from kvrecall.server.launch import check_settings
from kvrecall.server.mindie.planner import Beside, plan_config
from kvrecall.server.mindie.reader import Problems, dotted, read_config
from kvrecall.server.mindie.schema import Effect, effect_of, fields_of

EXAMPLE = r"""{
  "Version": "1.0.0",
  "ServerConfig": {
    "ipAddress": "127.0.0.1",
    "port": 1025,
    "allowAllZeroIpListening": false,
    "maxLinkNum": 1000,
    "httpsEnabled": false
  },
  "BackendConfig": {
    "kvPoolConfig": {"backend": "embedded", "configPath": "pool.json", "asyncWrite": true},
    "ModelDeployConfig": {
      "maxSeqLen": 8192,
      "maxInputTokenLen": 8000,
      "truncation": false,
      "ModelConfig": [
        {
          "modelName": "my-model",
          "modelWeightPath": "/path/to/the/model",
          "worldSize": 1,
          "cpuMemSize": 4,
          "npuMemSize": -1,
          "plugin_params": "{\"plugin_type\":\"prefix_cache,splitfuse\"}"
        }
      ]
    },
    "ScheduleConfig": {"cacheBlockSize": 128, "maxBatchSize": 64, "maxIterTimes": 2048}
  }
}
"""
"""A minimal config.json. The pool.json beside it: ``{"disk_path": ..., "disk_size": "20GiB"}``."""

_STYLES = {Effect.ACTS: "green", Effect.PARTLY: "yellow", Effect.NONE: "dim", Effect.RETIRED: "red"}

_WHO = "kvrecall config check"


def explain(file: Path, every: bool, allow_plaintext: bool = False) -> int:
    """Prints ``report`` as tables, the problems on stderr; returns the exit status."""
    found = report(file, every, allow_plaintext)
    # as wide as the terminal, or wide enough for the tables without one
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if found["fields"]:
        console.print(_fields_table(found["fields"]))
    if found["ok"]:
        console.print(_effective_table(found["effective"]))
        for warning in found["warnings"]:
            console.print(f"[yellow]warning:[/] {escape(warning)}")
        for note in found["notes"]:
            console.print(f"[dim]note:[/] {escape(note)}")
        return ExitStatus.OK
    errors = Console(stderr=True, soft_wrap=True)
    for line in found["problems"]:
        errors.print(escape(f"{_WHO}: {line}"), highlight=False)
    return ExitStatus.WRONG_SETTINGS


def report(file: Path, every: bool, allow_plaintext: bool = False) -> dict[str, Any]:
    """``ok``, ``problems`` (a line each), ``fields`` and the ``effective`` settings, as far as the
    file can be read. ``every``: fields that are not given, too."""
    found: dict[str, Any] = {"file": str(file), "ok": False, "problems": [], "fields": []}
    try:
        config, _ = read_config(file)
        found["fields"] = [
            {
                "field": dotted(path),
                "value": value,
                "given": given,
                "effect": effect_of(field).value,
                "text": field.description or "",
            }
            for path, value, given, field in fields_of(config)
            if given or every
        ]
        plan = plan_config(file, Beside(allow_plaintext=allow_plaintext))
        warnings = [*plan.warnings, *check_settings(plan, here=False)]
    except Problems as error:
        return found | {"problems": list(error.lines)}
    except KvrecallError as error:
        return found | {"problems": [str(error)]}
    spec = plan.spec
    scheme = "https" if spec.tls else "http"
    planes = {"business": f"{scheme}://{spec.host}:{spec.port}"}
    planes |= {each.name: f"{scheme}://{each.host}:{each.port}" for each in spec.listeners}
    effective = {
        "model": spec.model,
        "planes": planes,
        "options": {k: v for k, v in spec.options.items() if v is not None},
        "pool": None if spec.recall is None else dict(spec.recall),
        "bounds": plan.bounds(),
    }
    return found | {
        "ok": True,
        "effective": effective,
        "warnings": warnings,
        "notes": list(plan.notes),
    }


def _fields_table(fields: list[dict[str, Any]]) -> Table:
    table = Table("field", "value", "here", "what it does")
    section: str | None = None
    for each in fields:
        above, _, name = each["field"].rpartition(".")
        if above != section:
            section = above
            table.add_section()
            table.add_row(f"[bold]{escape(section) or 'config.json'}[/]")
        value, effect = each["value"], Effect(each["effect"])
        text = f"{value:g}" if isinstance(value, float) else str(value)
        shown = text if each["given"] else f"({text})" if value is not None else ""
        marked = f"[{_STYLES[effect]}]{effect.value}[/]"
        table.add_row(f"  {name}", escape(shown), marked, escape(each["text"]))
    return table


def _effective_table(effective: dict[str, Any]) -> Table:
    """The settings of vLLM and the pool that the file amounts to."""
    rows = {"model": effective["model"]}
    rows |= {f"{name} plane": url for name, url in effective["planes"].items()}
    rows |= effective["bounds"]
    rows |= {f"vllm --{name}": value for name, value in effective["options"].items()}
    pool = effective["pool"] or {"": "off"}
    rows |= {f"pool {name}".rstrip(): value for name, value in pool.items()}
    table = Table("effective setting", "value")
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    return table
