"""Declarations found in the source: constants with the text below them, errors raised."""

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
class Raised:
    """An error where it is raised; ``text``: with the names of values in capitals."""

    module: str
    kind: str
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


def raised(kinds: set[str]) -> Iterator[Raised]:
    """Errors of these classes raised with a text, in the order of the source."""
    for module, tree in modules().items():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[first, *_]) if kind in kinds:
                    if text := text_of(first):
                        yield Raised(module, kind, text)


def text_of(node: ast.expr) -> str:
    """A text with the names of its values in capitals; empty if it is not a text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(
                _placeholder(part.value) if isinstance(part, ast.FormattedValue) else text_of(part)
                for part in values
            )
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
    return ""


@cache
def _named() -> dict[str, str]:
    """Texts of constants whose name has one meaning in all modules."""
    found: dict[str, set[str]] = {}
    for tree in modules().values():
        for node in tree.body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))
                ) if name.isupper():
                    found.setdefault(name, set()).add(value)
    return {name: min(values) for name, values in found.items() if len(values) == 1}


def _placeholder(node: ast.expr) -> str:
    """A name for a value in a text: PATH for ``self.path``."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return _named().get(name) or name.strip("_").upper()
        case ast.Constant(value=value):
            return str(value)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join")):
            return "NAMES"
        case ast.Call(args=[first, *_]):
            return _placeholder(first)
        case ast.Call(func=ast.Attribute(value=value)) | ast.Subscript(value=value):
            return _placeholder(value)
    return "..."
