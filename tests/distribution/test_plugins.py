"""What the plug-ins cost a vLLM process that uses no kvrecall: vLLM loads them in every one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

_MOST_MS, _TIMES = 20.0, 10
_MEASURE = """
import importlib, json, os, sys, time
import torch, vllm.config, vllm.engine.arg_utils
before = set(sys.modules)
for plugin in sys.argv[2:] * int(sys.argv[1]):
    sys.stdout.flush()
    if os.fork():  # each in a process that has loaded vLLM and nothing of ours
        os.wait()
        continue
    began = time.process_time()
    module, name = plugin.split(":")
    getattr(importlib.import_module(module), name)()
    took_ms = 1e3 * (time.process_time() - began)
    theirs = [one for one in set(sys.modules) - before if one.split(".")[0] == "vllm"]
    print(json.dumps([plugin, took_ms, theirs]))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.long
def test_plugins_cost_little_where_they_are_not_used() -> None:
    """In time of the processor, and they import nothing of vLLM's."""
    pytest.importorskip("vllm")
    all_of_them = entry_points(group="vllm.general_plugins")
    ours = [one.value for one in all_of_them if one.value.startswith("kvrecall.")]
    assert len(ours) == 4
    command = [sys.executable, "-c", _MEASURE, str(_TIMES), *ours]
    plain = {name: text for name, text in os.environ.items() if not name.startswith("KVRECALL_")}
    done = subprocess.run(command, env=plain, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(rows) == _TIMES * len(ours)
    assert not [theirs for _, _, theirs in rows if theirs]
    for name in ours:
        took_ms = statistics.median(ms for plugin, ms, _ in rows if plugin == name)
        print(f"{name}: {took_ms:.1f} ms")
        assert took_ms < _MOST_MS, name
