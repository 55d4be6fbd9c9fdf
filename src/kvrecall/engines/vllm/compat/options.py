"""vLLM's options as its source declares them, read without importing it: a wrong one is known in
milliseconds instead of the ten seconds and more that vLLM takes to import.

What cannot be judged here passes, and vLLM's own parser judges it.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from kvrecall.engines.vllm.compat.versions import (
    DISTRIBUTIONS,
    Fit,
    fit_of,
    installed_version,
)
from kvrecall.errors import ConfigError

_ENGINE_ARGS = "engine/arg_utils.py"
_CLI_ARGS = ("entrypoints/launchers/cli_args.py", "entrypoints/common/cli_args.py")
"""The second is 0.33's."""
_FIELD = re.compile(r"^    ([a-z]\w*): *([^=\n#]+?)(?: *=.*)?$", re.MULTILINE)
_WRITTEN = re.compile(r"[\"']--([a-z][a-z0-9-]+)[\"']")
_LITERAL = re.compile(r"^(\w+)(?:: TypeAlias)? = Literal\[([^\[\]]*)\]$", re.MULTILINE)
_STRING = re.compile(r"\"([^\"]*)\"")
_COMMENT = re.compile(r"#.*")
_NUMBERS = ("int", "float")
_NUMBER = re.compile(r"auto|-?\d*\.?\d+(?:[eE]-?\d+)?[kKmMgGtT]?i?[bB]?")
_ALIKE = 3  # suggestions


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Names with dashes. ``numbers``: those that take one number; ``choices``: those that take one
    of some words. Any that is in ``names`` alone takes what it likes."""

    names: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)


def read_options(vllm: Path) -> EngineOptions:
    """The options of the vLLM in the folder ``vllm``. Raises OSError if its files are others."""
    cli_args = next((name for name in _CLI_ARGS if (vllm / name).is_file()), _CLI_ARGS[0])
    texts = [(vllm / name).read_text(encoding="utf-8") for name in (_ENGINE_ARGS, cli_args)]
    kinds: dict[str, str] = {}
    for text in texts:
        for name, kind in _FIELD.findall(text):
            kinds.setdefault(name.replace("_", "-"), kind.removesuffix(" | None"))
    written = {name for text in texts for name in _WRITTEN.findall(text)}
    literals: dict[str, list[str]] = {}
    for path in sorted((vllm / "config").glob("*.py")):
        for name, text in _LITERAL.findall(path.read_text(encoding="utf-8")):
            words = _COMMENT.sub("", text)
            if not _STRING.sub("", words).replace(",", "").strip():  # no names of other types
                literals[name] = _STRING.findall(words)
    return EngineOptions(
        frozenset(kinds.keys() | written),
        frozenset(name for name, kind in kinds.items() if kind in _NUMBERS),
        {name: literals[kind] for name, kind in kinds.items() if literals.get(kind)},
    )


def installed_options() -> EngineOptions | None:
    """The options of the installed vLLM; None if they are unknown: none or another than the tested
    version, or a plug-in for another platform, which may add some."""
    version = installed_version(*DISTRIBUTIONS)
    spec = importlib.util.find_spec("vllm")  # the package itself is not imported
    if spec is None or spec.origin is None or version is None:
        return None
    if fit_of(version) is not Fit.TESTED or entry_points(group="vllm.platform_plugins"):
        return None
    try:
        return read_options(Path(spec.origin).parent)
    except (OSError, UnicodeDecodeError):
        return None


def check_options(
    given: Mapping[str, object], words: Sequence[str], options: EngineOptions | None
) -> None:
    """Raises ConfigError for the first of ``given`` (long names and values) and ``words`` of a
    command line that vLLM cannot take."""
    if options is None:
        return
    for name, value in given.items():
        if value is not None and not isinstance(value, bool | Mapping | list | tuple):
            _check_values(f"--{name}", name, [str(value)], options)
    for shown, values in _grouped(words):
        name = shown[2:].replace("_", "-")
        if "." in name:  # a member of a JSON object
            name = name.partition(".")[0]
            values = []
        elif name in options.names:
            _check_values(shown, name, values, options)
        bare = name.removeprefix("no-")
        if not any(known.startswith((name, bare, _inverse(name))) for known in options.names):
            alike = difflib.get_close_matches(name, options.names, _ALIKE)
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
    is_ours = False  # behind a long option, not a short one
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else []))
            is_ours = True
        elif word.startswith("-") and not _NUMBER.fullmatch(word):
            is_ours = False
        elif is_ours:
            found[-1][1].append(word)
    yield from found


def _check_values(shown: str, name: str, values: Sequence[str], options: EngineOptions) -> None:
    choices = options.choices.get(name)
    if choices is None and name not in options.numbers:
        return
    if not values:
        raise ConfigError(f"vLLM options: {shown} needs a value")
    value = values[0]
    plain = value.replace("-", "_").lower()  # as vLLM reads some
    if choices is not None and not {value, plain} & {*choices, "none", ""}:
        raise ConfigError(f"vLLM options: {shown} is {value!r}; allowed: {', '.join(choices)}")
    if choices is None and not _NUMBER.fullmatch(value):
        raise ConfigError(f"vLLM options: {shown} is {value!r}; it must be a number")
    if len(values) > 1:
        raise ConfigError(f"vLLM options: {values[1]!r} is unexpected after {shown} {value}")
