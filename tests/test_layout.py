"""The rooms: imports point one way, only one room knows the engine, and none the laboratory."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kvrecall"

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"addresses", "errors", "block", "commands", "environment", "nicety"}),
    frozenset({"secret"}),
    frozenset({"config", "factories", "jsonfile", "traces"}),
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
        frozenset("changes checksum cipher clock compression hints lockfile names slots".split()),
        frozenset({"base", "departures", "eviction"}),
        frozenset({"accounts", "arena", "tier"}),
        frozenset({"cascade", "counters", "entries"}),
        frozenset({"disk", "remote"}),
        frozenset({"host"}),
        frozenset({"write_policy"}),
        frozenset({"writer"}),
        frozenset({"evictor"}),
        frozenset({"admin"}),
        frozenset({"pool"}),
        frozenset({"service"}),
        frozenset({"open"}),
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

STANDING: frozenset[tuple[str, str]] = frozenset()
"""Imports that close a circle or run up inside a room."""

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


def without(graph: Graph, edges: Set[tuple[str, str]]) -> Graph:
    return {
        name: {other for other in others if (name, other) not in edges}
        for name, others in graph.items()
    }


@pytest.mark.parametrize("room", INNER_FLOORS)
def test_every_part_of_a_big_room_has_a_floor(room: str) -> None:
    inside = {name for name in NAMES if name.startswith(f"{room}.")}
    assert {name for name in inside if floor(room, name) is None} == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(without(GRAPH, STANDING)) == []


def test_imports_inside_a_room_point_one_way() -> None:
    assert runs_up(GRAPH) - STANDING == set()


def test_what_is_listed_still_stands() -> None:
    closing = {(a, b) for one in circles(GRAPH) for a in one for b in GRAPH[a] & {*one}}
    assert STANDING - closing - runs_up(GRAPH) == set(), "it is gone: take it from STANDING"


def test_circles_and_floors_are_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [["b", "c"]]
    assert circles(without(graph, {("c", "b")})) == []
    assert runs_up({"pool.base": {"pool.disk.tier"}, "pool.disk.tier": {"pool.base"}}) == {
        ("pool.base", "pool.disk.tier")
    }
    assert ("pool.disk", "pool.disk.tier") in {(a, b) for a in GRAPH for b in GRAPH[a]}
    lazily = "kvrecall.engines.vllm.connector.connector"
    assert lazily in IMPORTS[Path("engines/vllm/__init__.py")]


@pytest.mark.parametrize(
    ("library", "rooms"),
    [("vllm", ["engines/vllm"]), ("sglang", ["engines/sglang"])],
)
def test_an_engine_is_imported_only_by_its_room(library: str, rooms: list[str]) -> None:
    def imports(module: Path, name: str) -> bool:
        return name.split(".")[0] == library and not module.as_posix().startswith(tuple(rooms))

    assert offenders(imports) == []


OF_LIBRARIES = frozenset({"_exit", "_fields", "_registry", "_extract_prompt_len"})
"""Private by their names, of Python and vLLM."""


def private_names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Private attributes named in a module, and whether they are its own: of ``self`` or ``cls``,
    or defined there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((one.id, True) for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield node.attr, own


def test_no_module_touches_anothers_private_state() -> None:
    modules = sorted(SOURCE.rglob("*.py"))
    named = {module: set(private_names(ast.parse(module.read_text()))) for module in modules}
    own = {module: {name for name, is_own in found if is_own} for module, found in named.items()}
    ours = {name for names in own.values() for name in names if name[:1] == "_" != name[1:2]}
    for module, found in named.items():
        used = ours & {name for name, is_own in found if not is_own}
        assert not used - own[module] - OF_LIBRARIES, module


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


@pytest.mark.parametrize(
    "module",
    "kvrecall kvrecall.pool.pool kvrecall.pool_cli kvrecall.cli kvrecall.engines.sglang".split(),
)
def test_importing_does_not_load_the_engine(module: str) -> None:
    program = (
        f"import sys, {module}; print(sorted({{'torch', 'vllm', 'sglang'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_copies_need_no_engine() -> None:
    """So that ``kvrecall gpu-check`` checks them where no supported vLLM is installed."""
    program = (
        "import sys, kvrecall.engines.vllm.connector.copier, kvrecall.gpu_check.cli;"
        "print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
