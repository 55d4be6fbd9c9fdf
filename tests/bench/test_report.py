"""What benchmarks print, and how they drive a server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrecall.bench import cli
from kvrecall.bench.model import Texts
from kvrecall.bench.report import Report, percentiles
from kvrecall.errors import EngineError
from kvrecall.processes.server import ServerProcess, _with_port


def test_percentiles() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p10": 1.0, "p50": 2.0, "p90": 3.0, "n": 3}
    assert percentiles([4.0, 1.0])["p50"] == 2.5
    assert percentiles([5.0]) == {"p10": 5.0, "p50": 5.0, "p90": 5.0, "n": 1}


@pytest.mark.parametrize("as_json", [True, False])
def test_a_report_is_a_table_or_one_line_of_json(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("name", ("what", "ms"), (("first", "1.5"),), {"first_ms": 1.5}, ("a note",))
    report.print(as_json)
    lines = capsys.readouterr().out.splitlines()
    if not as_json:
        assert any("a note" in line for line in lines)
        assert not any(line.startswith("{") for line in lines)
        return
    (found,) = map(json.loads, lines)
    assert (found["bench"], found["first_ms"]) == ("name", 1.5)
    assert {"cpu", "cores", "memory_gib", "gpu", "vllm", "kvrecall", "commit"} <= found.keys()


def test_every_command_has_help() -> None:
    for command in cli.COMMANDS:
        done = CliRunner().invoke(cli.app, [command, "--help"])
        assert done.exit_code == 0
        assert "--json" in done.output


def test_documents_have_their_length_and_share_no_prefix() -> None:
    texts = Texts()
    documents = [texts.document(1000) for _ in range(20)]
    assert {len(document.encode()) for document in documents} == {1000}
    assert len({document[:128] for document in documents}) == 20


def test_the_port_goes_before_vllm_options() -> None:
    assert _with_port(["m"], 7) == ["m", "--port", "7"]
    assert _with_port(["m", "--", "--x"], 7) == ["m", "--port", "7", "--", "--x"]


def test_a_server_that_does_not_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    lines: list[str] = []
    server = ServerProcess([str(tmp_path / "no-such-model")], tmp_path / "log", lines.append)
    with pytest.raises(EngineError, match="no-such-model"), server:
        pass
    server.stop()


def test_a_device_that_does_not_forget_is_asked_again_and_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM replies 200 and ``success: false`` while blocks are held."""
    refusals = 2

    class Held(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal refusals
            refusals -= 1
            body = json.dumps({"success": refusals < 0}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    server = ServerProcess([], tmp_path / "log", lambda _: None)
    monkeypatch.setattr(server, "ask", lambda text, _: asked.append(text))
    with HTTPServer(("127.0.0.1", 0), Held) as listening:
        server.port = listening.server_port
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        server.forget_device()
        assert len(asked) == 2
        refusals = 10**9
        monkeypatch.setattr("kvrecall.processes.server.SETTLE_TIMEOUT_S", 0.1)
        with pytest.raises(EngineError, match="still holds blocks"):
            server.forget_device()
        listening.shutdown()
