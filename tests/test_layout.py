"""The rooms: imports point one way, only one room knows the engine, and none the laboratory."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kvrecall"

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "block", "commands", "environment", "nicety"}),
    frozenset({"secret"}),
    frozenset({"config", "jsonfile", "traces"}),
    frozenset({"pool", "attention", "modelconfig"}),
    frozenset({"events"}),
    frozenset({"engines", "simulate", "testing"}),
    frozenset({"plan"}),
    frozenset({"server"}),
    frozenset({"router", "doctor", "processes", "pool_cli"}),
    frozenset({"bench"}),
    frozenset({"demo", "gpu_check"}),
    frozenset({"cli"}),
)
"""A room may import itself and rooms of lower floors."""

INNER_FLOORS: dict[str, tuple[frozenset[str], ...]] = {
    "pool": (
        frozenset("changes cipher clock compression hints lockfile names slots".split()),
        frozenset({"base", "departures", "eviction"}),
        frozenset({"accounts", "arena", "tier"}),
        frozenset({"cascade", "entries"}),
        frozenset({"disk", "remote"}),
        frozenset({"host"}),
        frozenset({"write_policy"}),
        frozenset({"writer"}),
        frozenset({"evictor"}),
        frozenset({"admin"}),
        frozenset({"pool"}),
        frozenset({"service"}),
    ),
    "engines.vllm": (
        frozenset({"device", "identity.changes", "identity.loaded"}),
        frozenset({"compat"}),
        frozenset({"wire"}),
        frozenset({"identity"}),
        frozenset({"attention"}),
        frozenset({"connector"}),
        frozenset({"serving"}),
        frozenset({"probe"}),
    ),
}
"""The floors inside the big rooms, of packages and modules; the longest name that fits counts."""

LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def name_of(module: Path) -> str:
    """``pool.disk`` for pool/disk/__init__.py."""
    return ".".join(module.with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(module) for module in MODULES}


def imported(module: Path) -> Iterator[str]:
    """Names of the modules a file imports, wherever in it the import stands: lazily and for type
    checkers, too."""
    package = ["kvrecall", *module.parts[:-1]]
    for node in ast.walk(ast.parse((SOURCE / module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{whole}.{alias.name}"
                yield inner if inner.removeprefix("kvrecall.") in NAMES else whole


IMPORTS = {module: sorted(set(imported(module))) for module in MODULES}


def offenders(imports: Callable[[Path, str], bool]) -> list[str]:
    return [
        f"kvrecall/{module} imports {name}"
        for module, names in IMPORTS.items()
        for name in names
        if imports(module, name)
    ]


def room_of(module: Path) -> str:
    """``__main__`` runs the room ``cli``."""
    return module.parts[0].removesuffix(".py").replace("__main__", "cli")


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module) for module in MODULES} - {"__init__"}
    assert rooms - LEVELS.keys() == set(), "give each its place in FLOORS"


def test_imports_point_one_way() -> None:
    def runs_up(module: Path, name: str) -> bool:
        parts = name.split(".")
        room = room_of(module)
        if parts[0] != "kvrecall" or len(parts) < 2 or room == "__init__" or parts[1] == room:
            return False
        return parts[1] in LEVELS and LEVELS[parts[1]] >= LEVELS[room]

    assert offenders(runs_up) == []


# -- inside the rooms -----------------------------------------------------------------------


Graph = Mapping[str, Set[str]]
GRAPH: Graph = {
    name_of(module): {name.removeprefix("kvrecall.") for name in names} & NAMES - {name_of(module)}
    for module, names in IMPORTS.items()
}


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def finish(name: str, edges: Graph, into: list[str]) -> None:
        seen.add(name)
        for other in edges.get(name, ()):
            if other not in seen:
                finish(other, edges, into)
        into.append(name)

    for name in graph:
        if name not in seen:
            finish(name, graph, order)
    back: dict[str, set[str]] = {name: set() for name in order}
    for name, others in graph.items():
        for other in others:
            back[other].add(name)
    seen.clear()
    found: list[list[str]] = []
    for name in reversed(order):
        if name not in seen:
            finish(name, back, made := [])
            found += [sorted(made)] if len(made) > 1 else []
    return found


def floor(room: str, module: str) -> int | None:
    """Of a module in a big room."""
    fitting = [
        (len(name), level)
        for level, names in enumerate(INNER_FLOORS[room])
        for name in names
        if f"{module}.".startswith(f"{room}.{name}.")
    ]
    return max(fitting)[1] if fitting else None


def runs_up(graph: Graph) -> set[tuple[str, str]]:
    """Imports inside the big rooms of a higher floor, or of another part of the same one."""
    found = set()
    for room in INNER_FLOORS:
        parts = {name: name.removeprefix(f"{room}.").split(".")[0] for name in graph}
        for name, others in graph.items():
            for other in others:
                levels = floor(room, name), floor(room, other)
                if None in levels:
                    continue
                if levels[1] > levels[0] or (  # type: ignore[operator]
                    levels[0] == levels[1] and parts[name] != parts[other]
                ):
                    found.add((name, other))
    return found


@pytest.mark.parametrize("room", INNER_FLOORS)
def test_every_part_of_a_big_room_has_a_floor(room: str) -> None:
    inside = {name for name in NAMES if name.startswith(f"{room}.")}
    assert {name for name in inside if floor(room, name) is None} == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(GRAPH) == []


def test_imports_inside_a_room_point_one_way() -> None:
    assert runs_up(GRAPH) == set()


def test_circles_and_floors_are_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [["b", "c"]]
    assert runs_up({"pool.base": {"pool.disk.tier"}, "pool.disk.tier": {"pool.base"}}) == {
        ("pool.base", "pool.disk.tier")
    }
    assert ("pool.disk", "pool.disk.tier") in {(a, b) for a in GRAPH for b in GRAPH[a]}
    lazily = "kvrecall.engines.vllm.connector.connector"
    assert lazily in IMPORTS[Path("engines/vllm/__init__.py")]


# -- the tests ------------------------------------------------------------------------------


TESTS = Path(__file__).parent

TESTED_BY: dict[str, str] = {
    "attention/kernels": "engines/vllm/attention/test_kernels.py",
    "attention/kernels/search_loops": "attention/kernels/test_search.py",
    "attention/selection": "attention/test_digest.py",
    "bench": "bench/test_bench.py",
    "bench/bandwidth": "gpu_check/test_gpu_check.py",
    "bench/restore": "../lab/tests/benchmarks/test_servers.py",
    "block": "engines/vllm/identity/test_namespace.py",
    "engines/base": "engines/vllm/serving/test_serving.py",
    "engines/sglang": "engines/sglang/test_storage.py",
    "engines/vllm/attention": "engines/vllm/attention/test_steps.py",
    "engines/vllm/attention/host_selection": "attention/test_index.py",
    "engines/vllm/attention/offloaded": "engines/vllm/attention/test_residency.py",
    "engines/vllm/compat/attention": "engines/vllm/connector/test_offload.py",
    "engines/vllm/compat/offloadable": "engines/vllm/connector/test_offload.py",
    "engines/vllm/connector/chains": "engines/vllm/connector/test_miss.py",
    "engines/vllm/connector/compare": "engines/vllm/connector/test_audit.py",
    "engines/vllm/connector/connector": "engines/vllm/connector/test_worker.py",
    "engines/vllm/connector/hit": "engines/vllm/connector/test_groups.py",
    "engines/vllm/connector/pages": "engines/vllm/connector/test_copier.py",
    "engines/vllm/connector/request": "engines/vllm/connector/test_scheduler.py",
    "engines/vllm/device": "engines/vllm/connector/test_copier.py",
    "engines/vllm/identity": "engines/vllm/identity/test_namespace.py",
    "engines/vllm/probe": "doctor/test_doctor.py",
    "engines/vllm/wire": "engines/vllm/connector/test_scheduler.py",
    "environment": "engines/vllm/attention/test_plugin.py",
    "errors": "test_cli.py",
    "modelconfig": "plan/test_groups.py",
    "nicety": "engines/vllm/connector/test_niceties.py",
    "plan/layers": "plan/test_groups.py",
    "pool/remote/backends": "pool/remote/test_objects.py",
    "pool/remote/store": "pool/remote/test_objects.py",
    "pool/service/link": "pool/service/test_loss.py",
    "pool/service/protocol": "pool/service/test_server.py",
    "pool_cli": "pool/service/test_admin.py",
    "processes/service": "processes/test_processes.py",
    "server": "server/test_routes.py",
    "server/mindie/check": "server/test_hostile_config.py",
    "server/why_cli": "server/test_serve.py",
    "simulate": "simulate/test_replay.py",
    "traces": "engines/vllm/connector/test_traces.py",
}
"""Modules, or rooms, without a test file of their own name: where their tests are."""


def file_of(module: Path) -> Path:
    """``room/test_module.py``; or the row of the module; or ``test_room.py``, in the room or beside
    it; or the row of the room."""
    named, room = module.with_name(f"test_{module.name}"), module.parent
    rows = [TESTED_BY.get(part.as_posix()) for part in (module.with_suffix(""), room)]
    places = [named, rows[0], room / f"test_{room.name}.py", room.parent / f"test_{room.name}.py"]
    found = [TESTS / place for place in (*places, rows[1]) if place and (TESTS / place).is_file()]
    return found[0].resolve() if found else TESTS / named


@functools.cache
def parts_of(test: Path) -> frozenset[Path]:
    """A test file and the files of the tests that it imports or runs."""
    found, todo = {test}, [test]
    while todo:
        file = todo.pop()
        tree = ast.parse(file.read_text())
        names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        named = [TESTS / f"{name.replace('.', '/')}.py" for name in names]
        said = {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        named += [file.parent / one.split("/")[-1] for one in said if one.endswith(".py")]
        new = {one.resolve() for one in named if one.is_file()} - found
        found |= new
        todo += new
    return frozenset(found)


@functools.cache
def reached_by(test: Path) -> frozenset[str]:
    """The modules that a test file imports, and those that these import."""
    text = "\n".join(part.read_text() for part in parts_of(test))
    todo = re.findall(r"\bkvrecall\.([\w.]+)", text)
    todo += [
        f"{package}.{name}".lstrip(".")
        for package, names in re.findall(r"from kvrecall\.?([\w.]*) import ([\w, ]+)", text)
        for name in names.split(", ")
    ]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found and name in NAMES:
            found.add(name)
            todo += GRAPH[name]
    return frozenset(found)


def is_exercised(module: Path) -> bool:
    """Whether its test imports it, itself or by way of what it imports, or runs its command."""
    test = file_of(module)
    if not test.is_file():
        return False
    command = module.parent.name if module.stem == "cli" else module.stem.removesuffix("_cli")
    text = "".join(part.read_text() for part in parts_of(test))
    return (
        name_of(module) in reached_by(test)
        or re.search(rf'["\' -]{command}["\' ]', text) is not None
    )


def test_a_modules_test_is_found_by_its_name() -> None:
    """The contract suites in ``testing`` run as tests themselves."""
    modules = [one for one in MODULES if one.stem[:2] != "__" and one.parts[0] != "testing"]
    found = {str(one): str(file_of(one)) for one in modules if not is_exercised(one)}
    assert found == {}, "write these tests, or name in TESTED_BY the files that have them"


def test_the_table_of_tests_is_short_and_true() -> None:
    assert len(TESTED_BY) <= 40
    assert [file for file in TESTED_BY.values() if not (TESTS / file).is_file()] == []
    rooms = {parent.as_posix() for module in MODULES for parent in module.parents}
    assert TESTED_BY.keys() - rooms - {one.with_suffix("").as_posix() for one in MODULES} == set()
    own = [
        row for row in TESTED_BY if (TESTS / row).with_name(f"test_{Path(row).name}.py").exists()
    ]
    assert own == [], "these have a file of their own"


@pytest.mark.parametrize(
    ("library", "rooms"),
    [("vllm", ["engines/vllm"]), ("sglang", ["engines/sglang"])],
)
def test_an_engine_is_imported_only_by_its_room(library: str, rooms: list[str]) -> None:
    def imports(module: Path, name: str) -> bool:
        return name.split(".")[0] == library and not module.as_posix().startswith(tuple(rooms))

    assert offenders(imports) == []


OF_OTHERS = frozenset("_ask _buffer _exit _extract_prompt_len _fd _fields _registry".split())
"""Private by their names: of Python, vLLM and the examples."""


def private_names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Private attributes named in a module, and whether they are its own: of ``self`` or ``cls``,
    or defined there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((one.id, True) for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvrecall"):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield node.attr, own


@functools.cache
def private_in(file: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Private attributes: its own, and others."""
    found = set(private_names(ast.parse(file.read_text())))
    own = {name for name, is_own in found if is_own and name[:1] == "_" != name[1:2]}
    return frozenset(own), frozenset(name for name, is_own in found if not is_own) - own


def test_no_module_touches_anothers_private_state() -> None:
    modules = [SOURCE / module for module in MODULES]
    ours = {name for module in modules for name in private_in(module)[0]}
    for module in modules:
        assert not ours & private_in(module)[1] - OF_OTHERS, module


def is_inside(module: Path, room: Path) -> bool:
    return room in module.parents if room.parts else module.parent == room


def test_no_test_touches_the_private_state_of_another_room() -> None:
    """A file in ``tests/pool`` may look into ``pool`` and the rooms below it; one of the
    laboratory's into none."""
    owners: dict[str, set[Path]] = {}
    for module in MODULES:
        for name in private_in(SOURCE / module)[0]:
            owners.setdefault(name, set()).add(module)
    faults = {
        f"{file}: {name}"
        for tests in (TESTS, TESTS.parent / "lab" / "tests")
        for file in sorted(tests.rglob("*.py"))
        for name in (private_in(file)[1] & owners.keys()) - OF_OTHERS
        if tests != TESTS
        or not any(is_inside(owner, file.relative_to(tests).parent) for owner in owners[name])
    }
    assert faults == set()


def test_nothing_names_the_laboratory() -> None:
    """It is not in the wheel."""
    found = [str(module) for module in MODULES if "kvrecall_lab" in (SOURCE / module).read_text()]
    assert found == []


def test_the_pool_knows_no_torch() -> None:
    assert offenders(lambda m, name: room_of(m) == "pool" and name.split(".")[0] == "torch") == []


def test_a_device_is_reached_through_one_room() -> None:
    """So that a simulated device stands for all of it, and other devices are other forms."""
    words = "torch.Stream torch.Event torch.cuda.Stream torch.cuda.Event current_stream".split()
    words += "cudart non_blocking swap_blocks pin_memory host_register".split()
    words += ["torch.cuda", "torch.version", "cuda:0", '"cuda"', "is_cuda_alike"]
    found = {
        f"{module} has {word}"
        for module in MODULES
        if not module.as_posix().startswith("engines/vllm/device/")
        for word in words
        if word in (SOURCE / module).read_text()
    }
    assert found == set()


def test_host_memory_for_a_device_is_locked_in_one_place() -> None:
    """Which no step calls: it may stall all launches of the process."""
    found = [m.as_posix() for m in MODULES if "pin_memory" in (SOURCE / m).read_text()]
    assert found == ["engines/vllm/device/driver.py"]
    callers = [m.stem for m in MODULES if re.search(r"\bpinned\(", (SOURCE / m).read_text())]
    assert sorted(callers) == ["accelerator", "driver"]


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        *((f"kvrecall{room}", "") for room in ("", ".pool.pool", ".pool_cli", ".cli")),
        ("kvrecall.engines.sglang", ""),
        # with what ``kvrecall gpu-check`` checks where no supported vLLM is installed
        ("kvrecall.engines.vllm.connector.copier, kvrecall.gpu_check.cli", "torch"),
    ],
)
def test_importing_does_not_load_the_engine(module: str, needs: str) -> None:
    program = f"import sys, {module}; print(*{{'torch', 'vllm', 'sglang'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == needs, done.stderr
