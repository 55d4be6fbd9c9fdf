"""The rooms: imports point one way, and only one room knows the engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kvrecall"

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "block"}),
    frozenset({"config", "jsonfile"}),
    frozenset({"pool", "retrieval"}),
    frozenset({"engines", "simulate", "testing"}),
    frozenset({"server", "plan"}),
    frozenset({"bench", "router"}),
    frozenset({"cli", "demo", "chaos", "gpucheck", "lab", "__main__"}),
)
"""A room may import itself and rooms of lower floors."""

MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def floor_of(room: str) -> int:
    for level, rooms in enumerate(FLOORS):
        if room in rooms:
            return level
    raise AssertionError(f"kvrecall.{room} has no place in FLOORS; give it one")


def imported(module: Path) -> Iterator[str]:
    """Names of the modules a file imports, wherever in it the import stands."""
    package = ["kvrecall", *module.parts[:-1]]
    for node in ast.walk(ast.parse((SOURCE / module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield whole
            if whole == "kvrecall":
                yield from (f"kvrecall.{alias.name}" for alias in node.names)


def rooms_imported(module: Path) -> Iterator[str]:
    for name in imported(module):
        parts = name.split(".")
        is_room = parts[0] == "kvrecall" and len(parts) > 1
        if is_room and ((SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").exists()):
            yield parts[1]


@pytest.mark.parametrize("module", [m for m in MODULES if m != Path("__init__.py")], ids=str)
def test_imports_point_one_way(module: Path) -> None:
    room = module.parts[0].removesuffix(".py")
    for other in rooms_imported(module):
        assert other == room or floor_of(other) < floor_of(room), (
            f"kvrecall/{module} imports kvrecall.{other}, which stands above it or beside it"
        )


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_the_engine_room_imports_vllm(module: Path) -> None:
    if module.parts[:2] != ("engines", "vllm"):
        assert not [name for name in imported(module) if name.split(".")[0] == "vllm"]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_its_own_room_imports_sglang(module: Path) -> None:
    if module.parts[:2] != ("engines", "sglang"):
        assert not [name for name in imported(module) if name.split(".")[0] == "sglang"]


@pytest.mark.parametrize("module", [m for m in MODULES if m.parts[0] == "pool"], ids=str)
def test_the_pool_knows_no_torch(module: Path) -> None:
    assert not [name for name in imported(module) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize(
    "module", ["kvrecall", "kvrecall.pool", "kvrecall.cli", "kvrecall.engines.sglang"]
)
def test_importing_does_not_load_the_engine(module: str) -> None:
    program = (
        f"import sys, {module}; print(sorted({{'torch', 'vllm', 'sglang'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
