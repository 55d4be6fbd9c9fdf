"""The rooms: imports point one way, only one room knows the engine, and none the laboratory."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kvrecall"

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"addresses", "errors", "block", "commands", "environment", "nicety", "ownership"}),
    frozenset({"secret"}),
    frozenset({"config", "factories", "jsonfile", "traces"}),
    frozenset({"pool", "attention", "modelconfig"}),
    frozenset({"engines", "simulate", "testing"}),
    frozenset({"plan"}),
    frozenset({"server"}),
    frozenset({"router", "doctor", "processes"}),
    frozenset({"bench"}),
    frozenset({"demo", "gpu_check"}),
    frozenset({"cli"}),
)
"""A room may import itself and rooms of lower floors."""

LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


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


@pytest.mark.parametrize(
    ("library", "rooms"),
    [("vllm", ["engines/vllm"]), ("sglang", ["engines/sglang"])],
)
def test_an_engine_is_imported_only_by_its_room(library: str, rooms: list[str]) -> None:
    def imports(module: Path, name: str) -> bool:
        return name.split(".")[0] == library and not module.as_posix().startswith(tuple(rooms))

    assert offenders(imports) == []


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
    "module", ["kvrecall", "kvrecall.pool", "kvrecall.cli", "kvrecall.engines.sglang"]
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
