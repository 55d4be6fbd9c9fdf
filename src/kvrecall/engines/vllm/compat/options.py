"""vLLM's options as its source declares them, read without importing it: a wrong one is known in
milliseconds instead of the ten seconds and more that vLLM takes to import.

What cannot be judged here passes, and vLLM's own parser judges it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from kvrecall.engines.vllm.compat.versions import DISTRIBUTIONS, Fit, fit_of, installed_version
from kvrecall.errors import ConfigError

_CLI_ARGS = ("entrypoints/launchers/cli_args.py", "entrypoints/common/cli_args.py")
"""The second is 0.33's."""
_WRITTEN = re.compile(r"[\"']--([a-z][a-z0-9-]+)[\"']")
_NUMBER = re.compile(r"auto|-?\d*\.?\d+(?:[eE]-?\d+)?[kKmMgGtT]?i?[bB]?")
_ALIKE = 3  # suggestions

NUMBER: Sequence[str] = ()
EngineOptions = Mapping[str, Sequence[str] | None]
"""By name, with dashes, what an option takes: one of some words, one ``NUMBER``, or, None, whatever
it likes."""


def installed_options() -> EngineOptions:
    """The options of the installed vLLM. None are known of another version than the tested ones, or
    beside a plug-in for another platform, which may add some."""
    version = installed_version(*DISTRIBUTIONS)
    spec = importlib.util.find_spec("vllm")  # the package itself is not imported
    if spec is None or spec.origin is None or version is None:
        return {}
    if fit_of(version) is not Fit.TESTED or entry_points(group="vllm.platform_plugins"):
        return {}
    try:
        return _read_options(Path(spec.origin).parent)
    except (OSError, UnicodeDecodeError, SyntaxError):
        return {}


def _read_options(vllm: Path) -> EngineOptions:
    """The options of the vLLM in the folder ``vllm``. Raises OSError if its files are others."""
    cli_args = next((name for name in _CLI_ARGS if (vllm / name).is_file()), _CLI_ARGS[0])
    sources = ("engine/arg_utils.py", cli_args)
    texts = [(vllm / name).read_text("utf-8") for name in sources]
    kinds: dict[str, Sequence[str] | None] = {"int": NUMBER, "float": NUMBER}
    for path in sorted((vllm / "config").glob("*.py")):
        kinds |= _literals(ast.parse(path.read_text("utf-8")))
    found: dict[str, Sequence[str] | None] = {}
    for text in texts:
        for kind in ast.walk(ast.parse(text)):
            for field in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    taken = ast.unparse(field.annotation).removesuffix(" | None")
                    found.setdefault(field.target.id.strip("_").replace("_", "-"), kinds.get(taken))
    return found | {w: None for t in texts for w in _WRITTEN.findall(t) if w not in found}


def _literals(tree: ast.Module) -> dict[str, Sequence[str] | None]:
    """The words of each ``Literal`` type of a module that consists of words alone."""
    found: dict[str, Sequence[str] | None] = {}
    for node in tree.body:
        match node:
            case ast.Assign(
                [ast.Name(name)], ast.Subscript(ast.Name("Literal"), words)
            ) | ast.AnnAssign(ast.Name(name), _, ast.Subscript(ast.Name("Literal"), words)):
                parts = words.elts if isinstance(words, ast.Tuple) else [words]
                values = [part.value for part in parts if isinstance(part, ast.Constant)]
                if len(values) == len(parts):
                    found[name] = [str(value) for value in values]
    return found


def check_options(
    given: Mapping[str, object], words: Sequence[str], options: EngineOptions
) -> None:
    """Raises ConfigError for the first of ``given`` (long names and values) and ``words`` of a
    command line that vLLM cannot take."""
    if not options:
        return
    for name, value in given.items():
        if value is not None and not isinstance(value, bool | Mapping | list | tuple):
            _check_values(f"--{name}", [str(value)], options.get(name))
    for shown, values in _grouped(words):
        name, dot, _ = shown[2:].replace("_", "-").partition(".")  # or a member of a JSON object
        if not dot:
            _check_values(shown, values, options.get(name))
        bare = name.removeprefix("no-")
        if not any(known.startswith((name, bare, _inverse(name))) for known in options):
            alike = difflib.get_close_matches(name, options, _ALIKE)
            meant = f"; did you mean {', '.join(f'--{one}' for one in alike)}?" if alike else ""
            raise ConfigError(
                f"vLLM options: there is no {shown}{meant or '; see vllm serve --help=all'}"
            )


def _inverse(name: str) -> str:
    """0.33 takes ``enable-x`` and ``disable-x`` of a switch that has either name."""
    if name.startswith("disable-"):
        return name.replace("disable-", "enable-", 1)
    return name.replace("enable-", "disable-", 1) if name.startswith("enable-") else name


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each long option with the words behind it, up to the next option."""
    found: list[tuple[str, list[str]]] = []
    values: list[str] = []  # of the last option; those of a short one are dropped
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            found.append((name, values))
        elif word.startswith("-") and not _NUMBER.fullmatch(word):
            values = []
        else:
            values.append(word)
    yield from found


def _check_values(shown: str, values: Sequence[str], taken: Sequence[str] | None) -> None:
    if taken is None:
        return
    if not values:
        raise ConfigError(f"vLLM options: {shown} needs a value")
    value = values[0]
    plain = value.replace("-", "_").lower()  # as vLLM reads some
    if taken and not {value, plain} & {*taken, "none", ""}:
        raise ConfigError(f"vLLM options: {shown} is {value!r}; allowed: {', '.join(taken)}")
    if not taken and not _NUMBER.fullmatch(value):
        raise ConfigError(f"vLLM options: {shown} is {value!r}; it must be a number")
    if len(values) > 1:
        raise ConfigError(f"vLLM options: {values[1]!r} is unexpected after {shown} {value}")
