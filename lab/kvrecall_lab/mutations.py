"""Faults made by rule, a sample of each important file: how many of them its own tests find.

``python -m kvrecall_lab.mutations``. A file's tests are its own and those that ``lab/mutants.toml``
names for it, without engines. It prints a line of JSON for each file, and one for all at the end.
"""

from __future__ import annotations

import ast
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab import mutants
from kvrecall_lab.mutants import trial
from kvrecall_lab.trials import Jobs, Keep, finish, one_of, run_trials

app = typer.Typer(add_completion=False)

FILES = tuple(
    f"{room}/{name}.py"
    for room, names in {
        "pool": "entries evictor pool slots write_policy",
        "pool/disk": "catalog codec engine flusher index reclaimer slabs tier",
        "pool/remote": "tier",
        "pool/service": "client server sessions",
        "engines/vllm/connector": "audit load saver scheduler",
        "engines/vllm/identity": "changes namespace",
    }.items()
    for name in names.split()
)
_ARGUMENTS = ("-m", "not engine and not long and not longest")
_OTHER: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutation:
    """The characters ``begin`` to ``end`` of a file become ``becomes``. What ``trial`` needs."""

    name: str
    file: str
    begin: int
    end: int
    becomes: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        return source[: self.begin] + self.becomes + source[self.end :]


def mutations(file: str, source: str, tests: tuple[str, ...]) -> list[Mutation]:
    """All of a file: comparisons, ``and``, ``or``, ``+`` and ``-`` turned round, integers one
    larger, ``not`` left out, statements left out, results None or turned round."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(line: int, column: int) -> int:
        text = source[lines[line - 1] : lines[line]].encode()[:column]
        return lines[line - 1] + len(text.decode())

    made = []
    for node, becomes in _changes(ast.parse(source)):
        begin = place(node.lineno, node.col_offset)
        end = place(node.end_lineno or 0, node.end_col_offset or 0)
        was = " ".join(source[begin:end].split())[:60]
        name = f"{Path(file).stem} {node.lineno}.{node.col_offset} {was} -> {becomes[:60]}"
        name = name.translate({ord("/"): "÷", ord(":"): ";"})  # a folder's, in PYTHONPATH
        made.append(Mutation(name, file, begin, end, becomes, tests))
    return made


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Parts of a program, and what each becomes; nothing of types, texts and logging."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case (
                ast.Expr(ast.Constant()) | ast.arg() | ast.Assert() | ast.JoinedStr()
                | ast.Expr(ast.Call(ast.Attribute(ast.Name("_LOG" | "logger"))))
            ):  # fmt: skip
                continue
            case ast.AnnAssign() if node.value is not None:
                yield from _changes(ast.Expression(node.value))
                continue
            case ast.Compare(ops=[op]) if type(op) in _OTHER:
                turned = ast.Compare(node.left, [_OTHER[type(op)]()], node.comparators)
                yield node, f"({ast.unparse(turned)})"
            case ast.BoolOp():
                yield node, f"({ast.unparse(ast.BoolOp(_OTHER[type(node.op)](), node.values))})"
            case ast.BinOp(left, op, right) if type(op) in _OTHER:
                yield node, f"({ast.unparse(ast.BinOp(left, _OTHER[type(op)](), right))})"
            case ast.UnaryOp(ast.Not()):
                yield node, f"({ast.unparse(node.operand)})"
            case ast.Constant(int(value)) if type(value) is int:
                yield node, str(value + 1)
            case ast.Return(ast.Constant(bool(value))):
                yield node, f"return {not value}"
            case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
                yield node, "return None"
            case ast.Expr(ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Delete():
                if not isinstance(tree, ast.Module | ast.ClassDef):
                    yield node, "pass"
        yield from _changes(node)


def _seconds(files: Sequence[str], report: Path) -> Mapping[str, float]:
    """Of the test functions of these files that ran, by a report of pytest."""
    seconds = dict[str, float]()
    for case in ElementTree.parse(report).iter("testcase"):
        where, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        file = next(one for one in files if f"{where}.".startswith(one[:-2].replace("/", ".")))
        inside = where[len(file) - 3 :].replace(".", "::")
        test = f"{file}{inside}::{name}"
        seconds[test] = seconds.get(test, 0.0) + float(case.get("time", 0))
    return seconds


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="A file; repeatable.")] = None,
    count: Annotated[int, typer.Option(help="Faults of each file.")] = 20,
    seed: Annotated[int, typer.Option(help="Another one draws others.")] = 0,
    fault: Annotated[list[str] | None, typer.Option(help="Its name; repeatable.")] = None,
    jobs: Jobs = 2,
    keep: Keep = False,
) -> None:
    """Plant a sample of faults made by rule in the most important files, one at a time, and run
    the tests of each file's own room."""
    named: dict[str, Counter[str]] = {file: Counter() for file in FILES}
    for one in mutants.mutants():
        named.get(one.file, Counter()).update(test.partition("::")[0] for test in one.tests)
    progress, figures, began = ProgressLines("mutations"), [], time.monotonic()
    with command_folder("mutations", keep) as folder:
        plain = folder / "plain"
        shutil.copytree(mutants._SOURCE, plain)
        for file in one_of(only, FILES, "only"):
            own = f"tests/{Path(file).parent}/test_{Path(file).stem}.py"
            named[file][own] += (mutants.ROOT / own).exists()
            tests = tuple(test for test, times in named[file].items() if times)
            none = Mutation(f"{Path(file).stem} as it is", file, 0, 0, "", tests)
            if (as_it_is := trial(none, plain, folder, (), *_ARGUMENTS)).how != "survived":
                finish({"file": file, "fails": as_it_is.seen}, False)
            seconds = _seconds(tests, folder / f"{none.name}.xml")
            most = f"--timeout={30 + 4 * max(seconds.values()):.0f}", round(10 + 3 * as_it_is.cpu_s)
            quickest = tuple(sorted(seconds, key=seconds.__getitem__))
            every = mutations(file, (plain / "kvrecall" / file).read_text(), quickest)
            some = random.Random(f"{seed} {file}").sample(every, min(count, len(every)))
            trials = {
                one.name: partial(
                    trial, one, plain, folder, (), *_ARGUMENTS, most[0], cpu_s=most[1]
                )
                for one in ([one for one in every if one.name in fault] if fault else some)
            }
            found = list(run_trials(progress, trials, jobs, lambda told: told.text).values())
            found = [one for one in found if one.how != "broken"]  # a name is not there, say
            left = [one.name for one in found if one.how == "survived"]
            figures.append({"mutants": len(found), "killed": len(found) - len(left)})
            print(json.dumps({"file": file, **figures[-1], "survived": left}), flush=True)
    killed, count = (sum(one[key] for one in figures) for key in ("killed", "mutants"))
    minutes = round((time.monotonic() - began) / 60)
    finish({"mutants": count, "killed": killed, "files": len(figures), "minutes": minutes}, True)


if __name__ == "__main__":
    app()
