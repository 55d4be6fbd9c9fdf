"""What runs each command of the documents.

A new command in a document needs an entry here; a removed one loses its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import scenes
from .pages import ROOT
from .stage import Stage


@dataclass(frozen=True, slots=True)
class Runs:
    """Every documented line of the command is run unchanged, except paths, ports and sizes.

    ``swaps``: parts of the line and their replacements. ``more``: added options that keep it small.
    ``before``: makes the files it needs; ``after``: checks those it made. ``says``: part of its
    output. ``stays``: part of a server's output when it is up; it is stopped at the end of the
    page. ``silent``: it prints nothing. ``needs``: a module without which it is skipped, because
    set-up does not require it.
    """

    swaps: tuple[tuple[str, str], ...] = ()
    more: str = ""
    before: Callable[[Stage], None] | None = None
    after: Callable[[Stage], None] | None = None
    says: str = ""
    stays: str = ""
    silent: bool = False
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another test, or CI itself, runs it: ``text`` is where, in the file ``file``."""

    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Needs:
    """The command needs what no CI machine has. Its section says so, in one of these ``words``."""

    what: str
    words: tuple[str, ...]


Kind = Runs | Elsewhere | Needs

_SOCKET = " --socket {folder}/pool.sock"
_TRACE = (("TRACE", "trace.jsonl"),)
_MODEL = "models/recall-tiny"
_SMALL_BENCH = " BENCH='--only lookup --add'"

# `make demo`, `make demo-mooncake` and the benchmarks restore and overhead are run by
# tests that are marked longest: `make test-all`.
_MAKE: Mapping[str, Kind] = {
    "make demo": Elsewhere("tests/demo/test_demo.py", 'played("demo")'),
    "make demo-mooncake": Elsewhere("tests/demo/test_demo.py", 'played("demo-mooncake")'),
    "make serve": Elsewhere("tests/demo/test_demo.py", 'str(ROOT), "serve")'),
    "make test": Elsewhere(".ci/run", "make test"),
    "make test-lab": Elsewhere(".ci/run", "make test-lab"),
    "make test-all": Elsewhere("Makefile", "$(WORKERS) -m ''"),
    "make check": Elsewhere(".ci/run", "scripts/check static"),
    "make hostile": Elsewhere(".ci/run", "make hostile"),
    "make faults": Elsewhere("lab/tests/test_faults.py", 'faults("--seeds", '),
    "make mutants": Elsewhere("lab/tests/test_mutants.py", "trial(one, plain, tmp_path"),
    "make chaos": Elsewhere("lab/tests/test_chaos.py", "ChaosRun(settings, "),
    "make identity": Elsewhere("lab/tests/test_identity.py", 'lab("identity", '),
    "make models": Elsewhere("lab/tests/test_shapes.py", 'lab("shapes", '),
    "make compat": Elsewhere("lab/tests/test_compat.py", 'lab("compat", '),
    "make streams": Elsewhere("lab/tests/test_streams.py", "check(model, 0, SCHEDULES"),
    "make bench": Runs(more=_SMALL_BENCH, before=scenes.repository, says="lookup"),
    "make gpu-check": Needs("a GPU", ("GPU",)),
}
_SERVING: Mapping[str, Kind] = {
    "kvrecall demo": Elsewhere("tests/distribution/test_wheel.py", 'program, "demo", '),
    "kvrecall serve": Elsewhere("tests/server/live.py", '= (KVRECALL, "serve")'),
    "kvrecall why": Elsewhere("tests/server/test_serve.py", 'ran(KVRECALL, "why", '),
    "kvrecall config check": Runs(before=scenes.mindie, says="modelWeightPath"),
    "kvrecall config example": Runs(says="modelWeightPath"),
    "kvrecall router": Runs(
        swaps=(("FILE", "instances"), ("/etc/kvrecall/", "")),
        before=scenes.instances,
        stays="Uvicorn running",
    ),
    "kvrecall gpu-check": Needs("a GPU", ("GPU",)),
    # With the engine: tests/doctor/test_doctor.py.
    "kvrecall doctor": Runs(
        swaps=(("MODEL", str(ROOT / _MODEL)), ("/var/cache/", ""), ("100G", "8M")),
        more=" --quick --host-size 8MiB",
        before=scenes.pool_settings,
        says="machine",
    ),
    "vllm serve": Elsewhere("tests/engines/vllm/serving/test_vllm_serve.py", "documented(PAGE, "),
    "export": Runs(silent=True),
    "curl": Runs(swaps=(("curl ", "curl --fail "),), before=scenes.a_server),
    "python -m sglang.launch_server": Needs("an SGLang server, which needs a GPU", ("GPU",)),
    "podman build": Needs("a container engine", ("container engine",)),
    "podman compose": Needs("a container engine", ("container engine",)),
    "promtool test rules": Elsewhere(
        "tests/distribution/test_alerts.py", '("test", "rules", TESTS)'
    ),
    "kubectl label nodes": Needs("a cluster", ("cluster",)),
    "kubectl apply": Needs("a cluster", ("cluster",)),
    "kubectl create secret generic kvrecall-api-key": Needs("a cluster", ("cluster",)),
    "install": Needs("systemd", ("systemd",)),
    "systemd-sysusers": Needs("systemd", ("systemd",)),
    "systemctl daemon-reload": Needs("systemd", ("systemd",)),
    "systemctl enable": Needs("systemd", ("systemd",)),
    "pip install": Elsewhere("tests/distribution/test_wheel.py", '"-m", "pip", '),
}
_POOL: Mapping[str, Kind] = {
    "kvrecall pool serve": Runs(
        swaps=(("500GiB", "64MiB"), ("64GiB", "8MiB"), ("/var/lib/kvrecall", "disk")),
        more=_SOCKET,
        stays="pool service on",
        after=scenes.filled,
    ),
    "kvrecall pool ls": Runs(more=_SOCKET),
    "kvrecall pool pin": Runs(more=_SOCKET, says="pinned"),
    "kvrecall pool unpin": Runs(more=_SOCKET),
    "kvrecall pool stat": Runs(more=_SOCKET, says="write policy through"),
    "kvrecall pool verify": Runs(more=f"{_SOCKET} --yes", says="9 blocks checked, 0 damaged"),
    "kvrecall pool drop": Runs(
        swaps=(("4e5c4225", scenes.QWEN.digest.hex()[:8]),),
        more=f"{_SOCKET} --yes",
        says="blocks dropped",
    ),
    "kvrecall pool clear": Runs(more=f"{_SOCKET} --yes", says="blocks dropped"),
    "kvrecall pool resize": Runs(swaps=(("50GiB", "32MiB"), ("4GiB", "4MiB")), more=_SOCKET),
    "kvrecall pool master": Runs(
        more=" --port 50051 --metrics-port 9003 --eviction_high_watermark_ratio 0.8",
        stays="Mooncake master on",
        after=scenes.master_answers,
        needs="mooncake.store",
    ),
    "kvrecall pool key": Runs(swaps=(("/etc/kvrecall/", ""),), after=scenes.of_the_owner_alone),
}
_BENCH: Mapping[str, Kind] = {
    "kvrecall bench chat": Elsewhere("tests/bench/test_serving.py", 'figures_of("chat", '),
    "python -m kvrecall_lab.bench router": Elsewhere(
        "lab/tests/benchmarks/test_servers.py", 'figures_of("router", '
    ),
    "python -m kvrecall_lab.bench tiers": Runs(more=" --rounds 2 --requests 1"),
    "kvrecall bench restore": Elsewhere("lab/tests/benchmarks/test_servers.py", '"restore", '),
    "kvrecall bench disk": Runs(more=" --size 64MiB"),
    "kvrecall bench lookup": Runs(),
    "python -m kvrecall_lab.bench index": Runs(more=" --blocks 5000 --repeats 2 --passes 1"),
    "python -m kvrecall_lab.bench step": Runs(more=" --sequences 4 --steps 40 --block-size 16"),
    "python -m kvrecall_lab.bench misses": Elsewhere(
        "lab/tests/benchmarks/test_servers.py", '"misses", '
    ),
    "python -m kvrecall_lab.bench launches": Runs(),
    "kvrecall bench replay": Elsewhere("lab/tests/benchmarks/test_servers.py", '"replay", '),
    "kvrecall bench overhead": Elsewhere("lab/tests/benchmarks/test_servers.py", '"overhead", '),
    "kvrecall bench service": Elsewhere("tests/bench/test_bench.py", '["service", '),
    "python -m kvrecall_lab.bench remote": Runs(
        more=" --no-engines --repetitions 1 --tokens 128", needs="mooncake.store"
    ),
    "python -m kvrecall_lab.bench decode": Elsewhere(
        "lab/tests/benchmarks/test_small.py", '"kvrecall_lab.bench", "decode"'
    ),
    "python -m kvrecall_lab.bench needle": Elsewhere(
        "lab/tests/benchmarks/test_needle.py", '"kvrecall_lab.bench", "needle", '
    ),
    "python -m kvrecall_lab.bench all": Runs(more=" --only lookup --add", before=scenes.repository),
    "python -m kvrecall_lab.bench publish": Runs(
        before=scenes.repository, says="docs/benchmarks.md"
    ),
}
_SIZING: Mapping[str, Kind] = {
    "kvrecall plan": Runs(swaps=(("/models/", "models/"),), before=scenes.llama),
    "kvrecall simulate": Runs(swaps=_TRACE, before=scenes.trace, says="rate"),
}
_STORES: Mapping[str, Kind] = {
    "aws s3 rm": Needs("an account there", ("need an account",)),
    "aws s3api put-bucket-lifecycle-configuration": Needs("an account there", ("need an account",)),
    "gcloud storage buckets update": Needs("an account there", ("need an account",)),
    "find": Runs(
        swaps=(("/mnt/nfs/", ""),),
        before=scenes.old_blocks,
        after=scenes.only_new_blocks,
        silent=True,
    ),
}

REGISTER: Mapping[str, Kind] = {
    **_MAKE, **_SERVING, **_POOL, **_BENCH, **_SIZING, **_STORES,
}  # fmt: skip
