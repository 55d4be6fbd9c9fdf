"""SGLang's storage backend, against SGLang's own interface.

The cases run in a process of their own: importing SGLang changes the environment of a process, and
its packages lie beside those of the environment (``scripts/setup`` puts them there).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PEER = Path(sys.prefix) / "peers" / "sglang"


@pytest.mark.skipif(not PEER.is_dir(), reason=f"no SGLang in {PEER}; scripts/setup brings it")
def test_the_cases() -> None:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", ""), str(PEER)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp"]
    # Not below this test's own folder: a socket's path may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="cases-") as folder:
        done = subprocess.run(
            [*command, f"{folder}/of", "tests/engines/sglang/cases.py"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=500,
        )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert passed is not None
    assert int(passed[1]) > 20
    assert not re.search(r"\d skipped", done.stdout)
