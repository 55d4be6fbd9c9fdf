"""The command line: errors in one line, with a status; help, version, completion."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Commands

from kvrecall import __version__, cli
from kvrecall.errors import ExitStatus, errors_shown
from kvrecall.processes.ports import free_port

KVRECALL = Path(sys.executable).parent / "kvrecall"
MOONCAKE = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
}
POOL = "pool serve --socket {folder}/run/p.sock --host-size 8MiB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    for name, content in {
        "binary.json": b"\x00\x01\xff\xfe",
        "empty.json": b"",
        "list.json": b"[1]",
        "policy.json": b'{"policy": "lur"}',
        "eight.json": b'{"host_size": 8}',
        "store.json": b'{"remote": {"kind": "mooncacke"}}',
        "secret.json": b"{}",
        "broken.json": b'{"a" 1}',
        "file": b"text",
    }.items():
        (folder / name).write_bytes(content)
    (folder / "secret.json").chmod(0)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "closed" / "model").mkdir(parents=True)
    (folder / "closed").chmod(0)
    (folder / "fixed").mkdir(mode=0o500)
    (folder / "unread").mkdir(mode=0o700)
    (folder / "unread" / "lock").touch()
    (folder / "unread" / "index.sqlite").touch(mode=0)
    (folder / "run").mkdir(mode=0o700)
    (folder / "run" / "file").write_text("precious")
    return folder


@pytest.fixture(scope="module")
def commands(folder: Path) -> Iterator[Commands]:
    with Commands(folder) as running:
        yield running
    (folder / "closed").chmod(0o700)


DENIED = "Permission denied"
ONE_LINE: list[tuple[str, int, str]] = [
    # paths that cannot be read or written
    ("serve closed/model", 2, f"model: closed/model cannot be read: {DENIED}"),
    ("serve model --pool-config closed/p.json", 2, f"closed/p.json: cannot be read: {DENIED}"),
    ("serve --config closed/config.json", 2, DENIED),
    ("serve model --host-size 8MiB --disk-path closed/d --disk-size 8MiB", 1, "cannot be reached"),
    (f"{POOL} --disk-path closed/d --disk-size 8MiB", 1, f"closed/d cannot be reached: {DENIED}"),
    (f"{POOL} --disk-path file/d --disk-size 8MiB", 1, "disk_path"),
    (f"{POOL} --disk-path file --disk-size 8MiB", 1, "file is not a folder"),
    (f"{POOL} --disk-path unread --disk-size 8MiB", 1, f"unread/index.sqlite: {DENIED}; give"),
    ("pool serve --config closed/pool.json", 2, DENIED),
    ("pool serve --socket {folder}/closed/x/p.sock", 2, DENIED),
    ("pool serve --socket {folder}/file/p.sock", 2, "/file: File exists; give another"),
    ("pool ls --disk-path closed/d", 1, f"closed/d: {DENIED}; give this user access"),
    ("pool ls --disk-path file/d", 1, "there is no folder file/d; check the path"),
    ("pool ls --disk-path file", 1, "file is a file; name the folder of a disk tier"),
    ("pool ls --disk-path closed", 2, "path 'closed' is not readable"),
    ("serve model --pool-config secret.json", 2, "path 'secret.json' is not readable"),
    ("pool ls --socket {folder}/closed/p.sock", 1, "no pool service"),
    ("pool key closed/key", 2, DENIED),
    ("pool key file/key", 2, "Not a directory"),
    ("simulate closed/trace --capacity-blocks 3", 2, f"closed/trace: cannot be read: {DENIED}"),
    ("simulate model --capacity-blocks 3", 2, "model: cannot be read"),
    ("plan closed/model", 1, f"closed/model: {DENIED}; give this user access"),
    ("bench disk --path closed/d", 1, f"closed/d: {DENIED}"),
    ("gpu-check --out file/x", 1, "file/x: Not a directory; a part of this path is a file"),
    ("serve model --host-size 8MiB --disk-path fixed/d --disk-size 8MiB", 1, "is not writable for"),
    ("serve model --host-size 8MiB --disk-path /proc/x --disk-size 8MiB", 1, "disk_path"),
    ("serve model --host-size 8MiB --disk-path /tmp --disk-size 8MiB", 1, "/tmp is shared with"),
    ("pool serve --socket {folder}/run/file", 2, "run/file exists and is not a socket"),
    # files that are not there or hold something else
    ("serve /none", 2, "there is no folder /none"),
    ("serve --config none.json", 2, "no such file"),
    ("serve --config model", 2, "is a folder"),
    ("serve --config broken.json", 2, "broken.json:1:6: expected ':'"),
    ("pool serve --config binary.json", 2, "binary.json:1:3: byte 0xff is not UTF-8"),
    ("pool serve --config empty.json", 2, "empty.json: is empty"),
    ("pool serve --config list.json", 2, "must hold a JSON object"),
    ("pool serve --config model", 2, "model: is a folder"),
    ("serve model --pool-config binary.json", 2, "binary.json:1:3"),
    ("simulate binary.json --capacity-blocks 3", 2, "binary.json: is not text"),
    ("simulate empty.json --capacity-blocks 3", 2, "no request has hash_ids"),
    ("plan binary.json", 2, "binary.json:1:3"),
    # errors found before an engine is loaded
    ("serve model --pool-config policy.json", 2, "'lur' is unknown; known: lru"),
    ("serve model --pool-config store.json", 2, "kind is 'mooncacke'; allowed: mooncake"),
    ("serve model --host-size 8MiB --disk-path d --disk-size 1MiB", 2, "the minimum is 8MiB"),
    ("serve model --host-size 999TiB", 2, "host_size: 1022976.00 GiB is more than"),
    ("serve model --no-pool --host-size 8GiB", 2, "--host-size and --no-pool contradict"),
    ("serve model --pool-service --host-size 8GiB", 2, "--host-size is '8GiB'; it has no effect"),
    ("serve ''", 2, "MODEL is ''"),
    ("serve model --block-size 0", 2, "--block-size is '0'; allowed: at least 1."),
    ("serve model other", 2, "'other' is unexpected; give one MODEL"),
    ("serve model --host ''", 2, "'' is not an address of this machine"),
    ("serve model --port 80", 2, "port 80 requires more privileges"),
    ("serve model --port {taken}", 2, "is in use; stop its server or choose another"),
    ("serve model --host 0.0.0.0", 2, "no API key is set"),
    ("serve model --management 0.0.0.0:8199", 2, "the management plane is 0.0.0.0"),
    ("serve model --management 8100", 2, "give HOST:PORT, as in 127.0.0.1:8001"),
    ("serve model --api-key-file {folder}/nothing", 2, "--api-key-file: there is no file"),
    ("serve model --host 192.0.2.1", 2, "not an address of this machine"),
    ("serve model --disk-path d", 2, "disk_size is not; the disk tier needs a hard limit"),
    ("serve model --disk-size 1GiB", 2, "disk_path is not"),
    ("serve model --host-size lots", 2, "--host-size: 'lots' is not a size"),
    ("serve model --kv-cache-memory-bytes x", 2, "'x' is not a size"),
    ("serve model --host-size 8MiB --disk-path d --disk-size 999TiB", 1, "disk_size"),
    ("serve model -- --port 1", 2, "--port cannot be given after --"),
    ("serve model -- --kv-transfer-config {{}}", 2, "cannot be given after --"),
    ("serve model --allow-plaintext", 2, "pool has no remote store"),
    ("serve --config c.json -- --port 1", 2, "; give --port before --"),
    # sizes that lack their unit
    ("serve model --host-size 8", 2, "--host-size: '8' has no unit, which makes it 8 bytes"),
    ("serve model --pool-config eight.json", 2, "eight.json:1:2: host_size: 8 has no unit"),
    ("pool serve --host-size 8", 2, "--host-size: '8' has no unit"),
    ("pool resize --host 4096", 2, "--host: '4096' has no unit"),
    # the router
    ("router --decode foo", 2, "--decode: 'foo' is not an address of an instance"),
    ("router --decode http://127.0.0.1:99999", 2, "not an address of an instance"),
    ("router --decode 127.0.0.1:8000 --port {taken}", 2, "is in use"),
    ("router --decode 127.0.0.1:8000 --host 192.0.2.1", 2, "no API key is set"),
    (
        "router --decode 127.0.0.1:8000 --host 192.0.2.1 --allow-unauthenticated",
        2,
        "not an address of this machine",
    ),
    ("router --decode http://127.0.0.1:8100", 2, "the router's own address"),
]  # fmt: skip


VLLM: list[tuple[str, str]] = [
    ("-- --nonsense", "there is no --nonsense; see vllm serve --help=all"),
    ("-- --max-num-sequences 4", "there is no --max-num-sequences; did you mean --max-num-seqs"),
    ("-- --max_num_seqs lots", "--max_num_seqs is 'lots'; it must be a number"),
    ("-- --max-num-seqs", "--max-num-seqs needs a value"),
    ("-- --max-num-seqs --enforce-eager", "--max-num-seqs needs a value"),
    ("-- --max-num-seqs 4 stray", "'stray' is unexpected after --max-num-seqs 4"),
    ("-- --gpu-memory-utilization=much", "--gpu-memory-utilization is 'much'; it must be a number"),
    ("-- --tensor-parallel-size two", "--tensor-parallel-size is 'two'; it must be a number"),
    ("-- --prefix-caching-hash-algo md5", "is 'md5'; allowed: sha256, sha256_cbor"),
    ("-- --scheduling-policy fair", "is 'fair'; allowed: fcfs, priority"),
    # kvrecall's own that go to vLLM
    ("--dtype float7", "--dtype is 'float7'; allowed: auto, half, float16, bfloat16"),
    ("--kv-cache-dtype int3", "--kv-cache-dtype is 'int3'; allowed: auto"),
    ("--max-model-len lots", "--max-model-len is 'lots'; it must be a number"),
]


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="there are no options")
@pytest.mark.parametrize(("words", "said"), VLLM)
def test_a_wrong_option_of_vllm_is_known_without_loading_vllm(
    commands: Commands, words: str, said: str
) -> None:
    done = commands.run(["serve", "model", "--host-size", "8MiB", *words.split()])
    assert (done.status, done.out) == (ExitStatus.WRONG_SETTINGS, "")
    (line,) = done.err.splitlines()  # with vLLM there would be its own
    assert line.startswith("kvrecall: vLLM options: ") or not words.startswith("-- ")
    assert said in line


def files_in(folder: Path) -> list[Path]:
    """All but the locks of sockets, which stay."""
    return sorted(path for path in folder.rglob("*") if path.suffix != ".lock")


@pytest.mark.parametrize(("line", "status", "said"), ONE_LINE, ids=lambda each: str(each)[:70])
def test_one_line_says_what_is_wrong(
    commands: Commands, folder: Path, line: str, status: int, said: str
) -> None:
    before = files_in(folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = line.format(folder=folder, taken=taken.getsockname()[1])
        words = ["" if word == "''" else word for word in line.split()]
        done = commands.run(words)
    last = done.err.splitlines()[-1]
    assert (done.status, done.out) == (status, ""), done
    assert re.match(r"kvrecall[ \w]*: ", last)
    assert said in last
    assert "kvrecall: kvrecall" not in last
    others = [line for line in done.err.splitlines()[:-1] if not line.startswith("gpu-check: ")]
    assert others == []
    assert files_in(folder) == before, "nothing is changed"


@pytest.mark.parametrize("order", ["ls", "verify", "clear"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("text", "index.sqlite: it is damaged (file is not a database); nothing is changed"),
        ("other", "index.sqlite: it belongs to another program; nothing is changed"),
        ("unreadable", f"index.sqlite: {DENIED}; give this user access"),
        ("empty", "yet (its index.sqlite is empty)"),
        ("folder", "index.sqlite is not a file"),
        ("pipe", "index.sqlite is not a file"),
    ],
)
def test_pool_commands_leave_the_files_of_others_alone(
    folder: Path, commands: Commands, name: str, said: str, order: str
) -> None:
    """Opening such a folder as a pool would move its index aside, and close it to other users."""
    foreign = folder / "foreign" / name
    index = foreign / "index.sqlite"
    if not foreign.exists():
        foreign.mkdir(parents=True, mode=0o755)
        index.write_bytes(b"not a database" * 100 if name in ("text", "unreadable") else b"")
    if name == "other":
        with contextlib.closing(sqlite3.connect(index)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS theirs (a)")
    elif name == "unreadable":
        index.chmod(0)
    elif name in ("folder", "pipe") and index.is_file():
        index.unlink()
        index.mkdir() if name == "folder" else os.mkfifo(index)
    before = [(path, path.stat().st_mode) for path in (foreign, *sorted(foreign.rglob("*")))]
    done = commands.run(["pool", order, "--disk-path", str(foreign)])
    assert (done.status, done.out) == (ExitStatus.FAILED, "")
    (line,) = done.err.splitlines()
    assert said in line
    after = [(path, path.stat().st_mode) for path in (foreign, *sorted(foreign.rglob("*")))]
    assert after == before


def test_no_model_is_served_by_accident(commands: Commands) -> None:
    done = commands.run(["serve"])
    assert (done.status, done.out) == (ExitStatus.WRONG_SETTINGS, "")
    assert done.err.startswith("kvrecall: no MODEL given; name a model folder or")


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("pool stat --socket none.sock --json", 1, "set its admin_socket and give that as"),
        ("plan none --json", 2, "none"),
        ("pool ls --limit 1e3 --json", 2, "--limit is '1e3'; must be a whole number."),
        ("why none --url http://127.0.0.1:9 --json", 1, "no kvrecall server answers"),
        ("simulate trace.jsonl --capacity-blocks 1e3 --json", 2, "is not a whole number of blocks"),
    ],
)
def test_under_json_errors_are_json_of_one_form(
    commands: Commands, line: str, status: int, said: str
) -> None:
    done = commands.run(line.split())
    told = json.loads(done.out)
    assert (done.status, done.err, told["status"]) == (status, "", status)
    assert said in told["error"]


def test_config_check(commands: Commands, folder: Path) -> None:
    done = commands.run(["config", "check", "broken.json"])
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(
        "kvrecall config check: broken.json:1:6: expected ':' after the key \"a\""
    )
    assert done.err.count("\n") == 1
    done = commands.run(["config", "check", "broken.json", "--json"])
    told = json.loads(done.out)
    assert (done.status, told["ok"], len(told["problems"])) == (2, False, 1)


def test_config_check_of_a_right_file_as_json(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "pool.json").write_text('{"host_size": "1GiB"}')
    example = json.loads(commands.run(["config", "example", str(tmp_path / "model")]).out)
    example["BackendConfig"]["kvPoolConfig"]["configPath"] = "pool.json"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(example))
    done = commands.run(["config", "check", str(path), "--json"])
    told = json.loads(done.out)
    assert (done.status, told["ok"], told["problems"]) == (0, True, [])
    assert told["effective"]["pool"]["host_size"] == "1GiB"
    fields = {each["field"]: each for each in told["fields"]}
    assert fields["ServerConfig.port"]["value"] == 1025
    assert all(each["given"] for each in told["fields"])
    (tmp_path / "pool.json").write_text('{"host_size": "1GiB", "policy": "lur"}')
    done = commands.run(["config", "check", str(path), "--json"])
    assert done.status == 2
    (line,) = json.loads(done.out)["problems"]
    assert line.startswith(str(path))
    assert "'lur' is unknown" in line


@pytest.mark.skipif(not importlib.util.find_spec("mooncake"), reason="there is no client")
@pytest.mark.parametrize("beside", [False, True])
def test_config_check_knows_what_the_installed_mooncake_cannot_do(
    commands: Commands, tmp_path: Path, beside: bool
) -> None:
    """The pool's settings are Mooncake's own file, or name it."""
    mooncake = tmp_path / "mooncake.json"
    mooncake.write_text(json.dumps({**MOONCAKE, "protocol": "ascend"}))
    pool = tmp_path / "pool.json"
    remote = {"kind": "mooncake", "config": str(mooncake), "allow_plaintext": True}
    pool.write_text(json.dumps({"host_size": "1GiB", "remote": remote}))
    example = json.loads(commands.run(["config", "example"]).out)
    backend = example["BackendConfig"]
    kind, file = ("mooncake", mooncake) if beside else ("embedded", pool)
    backend["kvPoolConfig"].update(backend=kind, configPath=str(file), allowPlaintext=beside)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = backend["ModelDeployConfig"]["ModelConfig"][0]
    model["modelWeightPath"] = str(tmp_path / "model")
    (tmp_path / "config.json").write_text(json.dumps(example))
    done = commands.run(["config", "check", str(tmp_path / "config.json"), "--json"])
    (said,) = [text for text in json.loads(done.out)["warnings"] if "protocol" in text]
    assert done.status == ExitStatus.OK
    assert said.startswith("remote: protocol is 'ascend'; the Mooncake client installed here is")


USAGE: list[tuple[str, str, str]] = [
    ("serve --port 99999", "serve", "--port is '99999'; allowed: at most 65535."),
    ("serve --port x", "serve", "--port is 'x'; must be a whole number."),
    ("serve --port", "serve", "option '--port' requires an argument."),
    (
        "serve m --gpu-memory-utilization 0.5",
        "serve",
        "no such option: --gpu-memory-utilization; an option of vLLM's goes after --: "
        "kvrecall serve MODEL -- --gpu-memory-utilization ...",
    ),
    ("serve model --role nurse", "serve", "'nurse' is not one of 'both', 'prefill', 'decode'."),
    ("nonsense", "", "no such command 'nonsense'."),
    ("pool nonsense", "pool", "no such command 'nonsense'."),
    ("pool ls --by colour", "pool ls", "'colour' is not one of 'namespace', 'model'"),
    ("pool serve --host-size", "pool serve", "option '--host-size' requires an argument."),
    ("bench nonsense", "bench", "no such command 'nonsense'."),
    ("bench disk --nonsense", "bench disk", "no such option: --nonsense."),
    (
        "router",
        "router",
        "no instance is given; give --engine, --prefill and --decode, or --instances",
    ),
    ("router --decode a:1 --timeout soon", "router", "--timeout is 'soon'; must be a number."),
    ("simulate", "simulate", "missing argument 'TRACE'."),
    ("config check", "config check", "missing argument 'file'."),
    ("plan a b c", "plan", "got unexpected extra argument(s) (b c)."),
]


@pytest.mark.parametrize(("line", "command", "said"), USAGE, ids=lambda each: str(each)[:40])
def test_wrong_usage_is_one_line(commands: Commands, line: str, command: str, said: str) -> None:
    done = commands.run(line.split())
    assert (done.status, done.out) == (ExitStatus.WRONG_SETTINGS, "")
    (told,) = done.err.splitlines()
    command = f"kvrecall {command}".strip()
    assert told.startswith(f"{command}: ")
    assert said in told
    assert told.endswith(f" Try '{command} --help'")


@pytest.mark.parametrize("line", ["", "config", "pool", "bench"])
def test_a_group_alone_shows_its_help(commands: Commands, line: str) -> None:
    done = commands.run(line.split())
    assert done.status == ExitStatus.WRONG_SETTINGS
    assert f"Usage: {f'kvrecall {line}'.strip()}" in done.out
    assert done.err == ""


def test_python_runs_the_package_as_the_command() -> None:
    for words, status in ((["--version"], ExitStatus.OK), (["pool", "drp"], 2)):
        said = [
            subprocess.run([*begin, *words], capture_output=True, text=True)
            for begin in ([str(KVRECALL)], [sys.executable, "-m", "kvrecall"])
        ]
        assert said[0].returncode == said[1].returncode == status
        assert (said[0].stdout, said[0].stderr) == (said[1].stdout, said[1].stderr)


@pytest.mark.parametrize("line", [*cli._ROOMS, "pool serve", "config check", "bench restore", ""])
def test_every_command_has_short_help(commands: Commands, line: str) -> None:
    done = commands.run([*line.split(), "-h"])
    assert done.status == ExitStatus.OK
    assert f"Usage: {f'kvrecall {line}'.strip()}" in done.out
    assert "-h" in done.out
    assert not [text for text in done.out.splitlines() if len(text) > 80 or "…" in text]
    commands_shown = done.out.partition("\nCommands:\n")[2].splitlines()
    assert not [text for text in commands_shown if text.endswith("...")], "cut"


def test_version(commands: Commands) -> None:
    done = commands.run(["--version"])
    python = ".".join(map(str, sys.version_info[:3]))
    assert done.status == ExitStatus.OK
    assert done.out.startswith(f"kvrecall {__version__} (")
    assert done.out.endswith(f", Python {python})\n")
    assert "vLLM" in done.out
    assert "torch" in done.out


def test_version_and_help_import_no_room() -> None:
    code = (
        "import sys, kvrecall.cli\n"
        "for words in (['--version'], ['--help']):\n"
        "    kvrecall.cli.app(words, standalone_mode=False)\n"
        "sys.exit(sorted({'numpy', 'pydantic', 'torch', 'fastapi', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "[]\n")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvrecall d", "doctor"),
        ("kvrecall pool l", "ls"),
        ("kvrecall bench dis", "disk"),
        ("kvrecall serve --disk-p", "--disk-path"),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, offered: str) -> None:
    asks = {"_KVRECALL_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asks["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run([KVRECALL], env=os.environ | asks, capture_output=True, text=True)
    assert offered in done.stdout.split()


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="there is no engine to load")
def test_an_interrupted_start_is_one_line(tmp_path: Path) -> None:
    """Ctrl-C while the engine's libraries are imported; what is known before is said before."""
    (tmp_path / "config.json").write_text("{}")
    remote = {"kind": "mooncake", **MOONCAKE, "protocol": "no-such", "allow_plaintext": True}
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps({"host_size": "8MiB", "remote": remote}))
    words = [str(tmp_path), "--pool-config", str(pool), "--port", str(free_port())]
    process = subprocess.Popen(
        [KVRECALL, "serve", *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    warned = False
    for line in process.stderr:
        warned = warned or "no such protocol of Mooncake" in line
        if "loading the engine" in line:
            process.send_signal(signal.SIGINT)
            break
    said = process.stderr.read()
    watchdog.cancel()
    assert process.wait() == ExitStatus.INTERRUPTED
    assert said.splitlines()[-1] == "kvrecall: interrupted"
    assert warned or not importlib.util.find_spec("mooncake")
    assert "Traceback" not in said


def test_an_error_of_no_path_is_a_bug_and_keeps_its_traceback() -> None:
    with pytest.raises(ConnectionResetError), errors_shown():
        raise ConnectionResetError(104, "Connection reset by peer")
