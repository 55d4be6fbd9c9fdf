"""The surroundings of documented commands: files, a filled pool, running servers."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvrecall.block import BlockKey, Namespace, tenant_of
from kvrecall.pool.service.client import ServiceClient
from kvrecall.testing import chain, wait_until
from kvrecall.testing.pool_contract import Engine

from .pages import ROOT
from .stage import Stage

QWEN = Namespace.of({"model": "Qwen3-8B"})
BLOCK_BYTES = 60_000
PINNED = bytes.fromhex("3f9a41c2").ljust(32, b"\1")
_LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
}  # fmt: skip


def trace(stage: Stage) -> None:
    """A small trace in Mooncake's format."""
    rows = [
        {"timestamp": 1000 * n, "input_length": 512, "output_length": 1,
         "hash_ids": [0, 1 + n % 3, 10 + n]}
        for n in range(30)
    ]  # fmt: skip
    (stage.folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def llama(stage: Stage) -> None:
    """The model that ``kvrecall plan`` is asked about, and a trace."""
    trace(stage)
    folder = stage.folder / "models" / "Meta-Llama-3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_LLAMA))


def mindie(stage: Stage) -> None:
    """The example config.json of the repository, with a model and a pool that are there."""
    (stage.folder / "model").mkdir()
    (stage.folder / "model" / "config.json").write_text("{}")
    (stage.folder / "pool.json").write_text('{"host_size": "16MiB"}')
    text = (ROOT / "examples" / "config.json").read_text()
    text = text.replace("/path/to/the/model", str(stage.folder / "model"))
    (stage.folder / "config.json").write_text(text)


def pool_settings(stage: Stage) -> None:
    """The pool.json that a machine is checked for."""
    (stage.folder / "pool.json").write_text('{"host_size": "16MiB"}')


def repository(stage: Stage) -> None:
    """What ``make`` and the benchmarks' ``publish`` use of a checkout. The environment is this one;
    ``scripts/setup`` finds nothing to do."""
    if (stage.folder / "Makefile").exists():
        return
    names = ("Makefile", "scripts/bench", "scripts/chart")
    for name in (*names, "lab/results/latest.json"):
        (stage.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, stage.folder / name)
    shutil.copytree(ROOT / "docs", stage.folder / "docs")
    setup = stage.folder / "scripts" / "setup"
    setup.write_text("#!/bin/sh\n")
    setup.chmod(0o755)
    (stage.folder / ".venv").symlink_to(sys.prefix)


def filled(stage: Stage) -> None:
    """A pool service with nine blocks: five of a tenant, and one to be pinned."""
    client = ServiceClient(stage.folder / "pool.sock", call_timeout_s=10.0)
    client.register(QWEN, BLOCK_BYTES)
    engine = Engine(client, BLOCK_BYTES)
    for keys, tenant in (
        ([*chain(QWEN, 3), BlockKey(QWEN.digest + PINNED)], None),
        (chain(QWEN, 5, "of a team"), tenant_of("team-a")),
    ):
        engine.save(keys, *([tenant] if tenant else []))
        client.flush(keys, 60.0)
    engine.close()
    client.close()


def old_blocks(stage: Stage) -> None:
    """A directory store with a file that was written 31 days ago, and one of today."""
    folder = stage.folder / "kv" / "v1"
    folder.mkdir(parents=True)
    for name, days in (("old", 31), ("new", 0)):
        (folder / name).write_text("a block")
        when = time.time() - days * 86_400
        os.utime(folder / name, (when, when))


def only_new_blocks(stage: Stage) -> None:
    assert [path.name for path in (stage.folder / "kv" / "v1").iterdir()] == ["new"]


def of_the_owner_alone(stage: Stage) -> None:
    assert (stage.folder / "key").stat().st_mode & 0o777 == 0o600


def master_answers(stage: Stage) -> None:
    """By the command the page names for it."""
    line = f"kvrecall pool master --check 127.0.0.1:{stage.port(50051)}"

    def answered() -> bool:
        try:
            return "answers" in stage.run(line)
        except AssertionError:
            return False

    wait_until(answered, 60.0)


class _Instance(BaseHTTPRequestHandler):
    """An OpenAI server that answers every prompt alike."""

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "MODEL"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        choices = [{"index": 0, "text": "an answer", "finish_reason": "stop"}]
        self._reply({"model": asked["model"], "choices": choices, "usage": usage})

    def _reply(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def instances(stage: Stage) -> None:
    """Instances for the router, without engines, a file that lists them, and one with a key."""
    (stage.folder / "keys").touch(0o600)
    (stage.folder / "keys").write_text("a key\n")
    for number in (8001, 8002):
        if not stage.uses(number):
            server = ThreadingHTTPServer(("127.0.0.1", stage.port(number)), _Instance)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stage.keep(server.server_close)
            stage.keep(server.shutdown)
    (stage.folder / "instances").write_text(
        stage.ported("engine http://127.0.0.1:8001\nengine http://127.0.0.1:8002\n")
    )


def a_server(stage: Stage) -> None:
    """kvrecall's routes over an engine that answers with the words it is given, at port 8000."""
    if stage.uses(8100) or stage.uses(8000):
        return  # started by an earlier line: the page's own, or this one
    import uvicorn
    from fastapi import FastAPI
    from server.fake import FakeEngine

    from kvrecall.engines.base import ServeSpec
    from kvrecall.server.application import attach_all
    from kvrecall.server.plan import Plan

    app = FastAPI()

    @app.post("/v1/completions")
    def completions() -> dict[str, object]:
        """As `vllm serve` with the connector (tests/engines/vllm/serving/test_vllm_serve.py)."""
        return {"kv_transfer_params": {"kvrecall": {"device": 0, "computed": 3}}}

    attach_all(app, FakeEngine(), plan=Plan(ServeSpec("m", "127.0.0.1", 1, {})))
    config = uvicorn.Config(app, port=stage.port(8000), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    stage.keep(thread.join)
    stage.keep(lambda: setattr(server, "should_exit", True))
    wait_until(lambda: server.started)
