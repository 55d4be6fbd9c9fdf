"""The test's end of ``driver.py``."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import warm

from engines.vllm import driver

_COLD = multiprocessing.get_context("spawn")
_READ_AT_IMPORT = ("AS_GPU", "OMP_", "TORCH", "TRITON_")
"""Beginnings of variables that matter while vLLM and what it needs are imported."""


class EngineFailed(Exception):
    """The engine refused an order; the text is the error it named."""


class Engine:
    """A real vLLM engine in a process of its own: a warm one, or a fresh one where variables change
    imports."""

    def __init__(self, log: Path, **setup: Any) -> None:
        self.log = log
        given: dict[str, str] = setup.pop("env", {})
        cold = any(name.startswith(_READ_AT_IMPORT) for name in given)
        context = _COLD if cold else warm.CONTEXT
        self._orders, orders = context.Pipe()
        environment = {**os.environ, **given}
        self.process: BaseProcess = context.Process(
            target=driver.main, args=(orders, str(log), environment)
        )
        self.process.start()
        orders.close()
        try:
            self._ask(setup)
        except EngineFailed:
            self.kill()
            raise

    def _ask(self, order: dict[str, Any]) -> Any:
        try:
            self._orders.send_bytes(json.dumps(order).encode())
            reply = json.loads(self._orders.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineFailed(f"the engine process died; see {self.log}\n{self.tail()}") from error
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

    def ask_anew(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """The same, of a device that has forgotten everything."""
        assert self.forget_device()
        return self.ask(prompt, **sampling)

    def close(self) -> None:
        """Ends it in order; kills it if it does not."""
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self._orders.send_bytes(b'{"do": "close"}')
            self.process.join(60)
            self.kill()
        self._orders.close()

    def kill(self) -> None:
        """kill -9 of the process and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


def prompt_of(tokens: int, seed: int) -> list[int]:
    """A prompt no other seed shares a block with."""
    draw = random.Random(seed)
    return [draw.randrange(1, 250) for _ in range(tokens)]
