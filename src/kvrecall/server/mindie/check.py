"""What ``kvrecall config check`` and ``config example`` print."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrecall.errors import ConfigError, ExitStatus, KvrecallError
from kvrecall.jsonfile import JsonPath
from kvrecall.server.launch import check_settings
from kvrecall.server.mindie.planner import Beside, plan_config
from kvrecall.server.mindie.reader import Problems, dotted, read_config
from kvrecall.server.mindie.schema import Effect, effect_of, fields_of
from kvrecall.server.plan import Plan

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
    """Prints a table of the fields and the errors; returns the exit status."""
    console, errors = _console(), Console(stderr=True, soft_wrap=True)
    try:
        config, _ = read_config(file)
    except Problems as error:
        for line in error.lines:
            errors.print(escape(f"{_WHO}: {line}"), highlight=False)
        return ExitStatus.WRONG_SETTINGS
    except ConfigError as error:
        errors.print(escape(f"{_WHO}: {error}"), highlight=False)
        return ExitStatus.WRONG_SETTINGS
    console.print(_table(config, every))
    try:
        plan = _planned(file, allow_plaintext)
    except KvrecallError as error:
        errors.print(escape(f"{_WHO}: {error}"), highlight=False)
        return ExitStatus.WRONG_SETTINGS
    _print_plan(console, plan)
    return 0


def report(file: Path, every: bool, allow_plaintext: bool = False) -> dict[str, Any]:
    """What ``explain`` prints, for JSON: ``ok``, ``problems`` (a line each), ``fields`` and the
    ``effective`` settings, as far as the file can be read."""
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
        plan = _planned(file, allow_plaintext)
    except Problems as error:
        return found | {"problems": list(error.lines)}
    except KvrecallError as error:
        return found | {"problems": [str(error)]}
    effective = {
        "model": plan.spec.model,
        "options": {k: v for k, v in plan.spec.options.items() if v is not None},
        "pool": None if plan.spec.recall is None else dict(plan.spec.recall),
        "bounds": plan.bounds(),
    }
    return found | {
        "ok": True,
        "effective": effective,
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
    }


def _planned(file: Path, allow_plaintext: bool) -> Plan:
    """The plan of a file, with its model and pool checked. Raises KvrecallError."""
    plan = plan_config(file, Beside(allow_plaintext=allow_plaintext))
    return replace(plan, warnings=(*plan.warnings, *check_settings(plan, here=False)))


def _console() -> Console:
    """A console as wide as the terminal, or wide enough for the tables without one."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def _table(config: BaseModel, every: bool) -> Table:
    table = Table("field", "value", "here", "what it does")
    section: JsonPath | None = None
    for path, value, given, field in fields_of(config):
        if not (given or every):
            continue
        if path[:-1] != section:
            section = path[:-1]
            table.add_section()
            table.add_row(f"[bold]{escape(dotted(section)) or 'config.json'}[/]")
        text = f"{value:g}" if isinstance(value, float) else str(value)
        shown = text if given else f"({text})" if value is not None else ""
        effect = effect_of(field)
        marked = f"[{_STYLES[effect]}]{effect.value}[/]"
        table.add_row(f"  {path[-1]}", escape(shown), marked, escape(field.description or ""))
    return table


def _print_plan(console: Console, plan: Plan) -> None:
    """Prints the effective configuration of vLLM and the pool."""
    table = Table("effective setting", "value")
    spec = plan.spec
    table.add_row("model", escape(spec.model))
    scheme = "https" if spec.tls else "http"
    table.add_row("business plane", f"{scheme}://{spec.host}:{spec.port}")
    for each in spec.listeners:
        table.add_row(f"{each.name} plane", f"{scheme}://{each.host}:{each.port}")
    for name, text in plan.bounds().items():
        table.add_row(name, text)
    for name, value in spec.options.items():
        if value is not None:
            table.add_row(f"vllm --{name}", escape(str(value)))
    for name, value in (spec.recall or {"pool": "off"}).items():
        table.add_row(f"pool {name}", escape(str(value)))
    console.print(table)
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    for note in plan.notes:
        console.print(f"[dim]note:[/] {escape(note)}")
