"""Declarations found in the source: constants with the text below them, classes of errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kvrecall

SOURCE = Path(kvrecall.__file__).parent


@dataclass(frozen=True, slots=True)
class Constant:
    """A module constant that is a string, with the docstring below it."""

    module: str
    name: str
    value: str
    text: str


@dataclass(frozen=True, slots=True)
class ErrorClass:
    module: str
    name: str
    bases: tuple[str, ...]
    text: str


@cache
def modules() -> dict[str, ast.Module]:
    """All modules of the package, by dotted name below it."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def constants() -> Iterator[Constant]:
    """String constants of modules that have a docstring."""
    for module, tree in modules().items():
        for here, below in zip(tree.body, tree.body[1:], strict=False):
            match here, below:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield Constant(module, name, value, text)


def error_classes() -> list[ErrorClass]:
    """KvrecallError and all its subclasses."""
    classes = [
        ErrorClass(
            module,
            node.name,
            tuple(base.id for base in node.bases if isinstance(base, ast.Name)),
            ast.get_docstring(node) or "",
        )
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    ours = below("KvrecallError", classes)
    return [one for one in classes if one.name in ours]


def below(name: str, classes: Sequence[ErrorClass]) -> set[str]:
    """The names of a class and all its subclasses."""
    found = {name}
    while True:
        more = found | {one.name for one in classes if found & set(one.bases)}
        if more == found:
            return found
        found = more
