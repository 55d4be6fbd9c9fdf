"""The Triton kernels, in Triton's interpreter and compiled for GPUs that are absent here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ran

pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["paged_cases.py", "search_cases.py", "device_cases.py", "recall_cases.py", "graph_cases.py"],
)
def test_they_are_right_in_tritons_interpreter(name: str) -> None:
    plugins = "-p", "no:cacheprovider", "-p", "engines.vllm.attention.alone"
    done = run("-m", "pytest", "-q", *plugins, str(Path(__file__).with_name(name)))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_for_gpus_and_keep_to_their_registers(capability: int) -> None:
    """A program that spills to memory reads and writes more than the KV it attends to."""
    script = Path(__file__).with_name("compiled.py")
    done = run(str(script), str(capability), interpret="0")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == (36 if capability >= 90 else 30), done.stdout
    for line in lines:
        spilled = int(line.split("spills ")[1].split()[0])
        assert spilled <= 256, line


def run(*command: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: Triton decides when it is first imported whether kernels are
    interpreted."""
    return ran(sys.executable, *command, env={**os.environ, "TRITON_INTERPRET": interpret})
