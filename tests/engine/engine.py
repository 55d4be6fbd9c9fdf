"""The test's end of ``driver.py``."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("driver.py")


class EngineFailed(Exception):
    """The engine refused an order; the text is the error it named."""


class Engine:
    """A real vLLM engine in a process of its own."""

    def __init__(self, log: Path, **setup: Any) -> None:
        self.log = log
        self._out = log.open("a")
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._out,
            text=True,
            start_new_session=True,
        )
        try:
            self._ask(setup)
        except EngineFailed:
            self.kill()
            raise

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise EngineFailed(f"the engine process died; see {self.log}\n{self.tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{reply['error']}\n{self.tail()}")
        return reply["ok"]

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])

    def __getattr__(self, name: str) -> Any:
        return lambda **order: self._ask({"do": name, **order})

    def ask(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        (reply,) = self._ask({"do": "generate", "prompts": [prompt], **sampling})
        return reply

    def close(self) -> None:
        """Ends it in order; kills it if it does not."""
        if self.process.poll() is None and self.process.stdin is not None:
            try:
                self.process.stdin.write(json.dumps({"do": "close"}) + "\n")
                self.process.stdin.close()
                self.process.wait(60)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                self.kill()
        self._out.close()

    def kill(self) -> None:
        """kill -9 of the process and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def prompt_of(tokens: int, seed: int) -> list[int]:
    """A prompt no other seed shares a block with."""
    draw = random.Random(seed)
    return [draw.randrange(1, 250) for _ in range(tokens)]
