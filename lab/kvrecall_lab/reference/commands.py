"""Every command of ``kvrecall`` with its arguments and options, from typer."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main

from kvrecall import cli
from kvrecall.bench import cli as bench
from kvrecall.config import Settings, default_socket
from kvrecall_lab.bench import cli as lab
from kvrecall_lab.reference.markdown import code, sentence, table

_HEAD = """# Commands

Every command and option of `kvrecall`; `kvrecall COMMAND --help` prints them with the defaults on
your machine. Sizes are `8GiB` (powers of 1024), `8GB` (of 1000) or bytes, with a unit below 1 MiB;
ages are `90m`, `12h`, `7d`. All commands end with the same [exit codes](exit-codes.md).
"""
_SHARED = """## Options of several commands

A command that takes one of these lists it by name.
"""
_OPTION = ("option", "meaning")
_DEFAULT = re.compile(r" ?(?:Default: (?=.*\.$)|\[(?=.*\]$))(.+?)[.\]]$")
"""A default in the text of an option."""
Row = tuple[str, str]
_KINDS = {int: "integer", float: "number", str: "text", Path: "path"}


def page() -> str:
    found = list(commands())
    links = [f"[{name.removeprefix('kvrecall ')}](#{name.replace(' ', '-')})" for name, _ in found]
    own = [one for _, command in found for one in _options(command) if not _is_setting(one)]
    uses = Counter(map(_row, own))
    shared = [row for row, times in uses.items() if times > 2]
    parts = [_HEAD, " · ".join(links) + "\n", _SHARED, table(_OPTION, shared)]
    parts += [_section(name, command, shared) for name, command in found]
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Each runnable command, by its full name; first ``kvrecall`` with its options."""
    top = typer.main.get_command(cli.app)
    if any(one.name != "help" for one in top.params):
        yield "kvrecall", top
    yield from _below("kvrecall", top)


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    words = name.split()
    if len(words) == 2 and words[1] in cli._ROOMS:
        room = importlib.import_module(cli._ROOMS[words[1]][0])
        command = typer.main.get_command(room.app)
    elif len(words) == 3 and words[1] == "bench" and words[2] in bench.COMMANDS:
        own = {**bench.COMMANDS, "replay": lab.COMMANDS["replay"]}  # also where it is not installed
        text = own[words[2]][1]
        command = typer.main.get_command(bench.benchmark(words[2], own))
        command.help = command.help or text
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    if name != "kvrecall" and command.invoke_without_command:
        yield name, command
    for word, one in inner.items():
        if not one.hidden:
            yield from _below(f"{name} {word}", one)


def _section(name: str, command: Any, shared: Sequence[Row]) -> str:
    options = _options(command)
    arguments = [one for one in _shown(command) if one.param_type_name == "argument"]
    words = [name, *(_metavar(one) for one in arguments), *(["[OPTIONS]"] if options else [])]
    parts = [f"## {name}\n", f"```text\n{' '.join(words)}\n```\n", _help(command)]
    given = [(code(_metavar(one)), _text(one)) for one in arguments]
    parts.append(table(("argument", "meaning"), given))
    own = [one for one in options if _row(one) not in shared and not _is_setting(one)]
    panels = dict.fromkeys(getattr(one, "rich_help_panel", None) for one in own)
    for panel in panels:
        rows = [_row(one) for one in own if getattr(one, "rich_help_panel", None) == panel]
        title = panel if panel and len(panels) > 1 else ""
        parts.append(f"**{title}**\n" if title else "")
        parts.append(table(_OPTION, rows))
    named = [code(one.opts[0]) for one in options if _is_setting(one)]
    if named:
        parts.append(f"[Settings of the pool](settings.md) as options: {', '.join(named)}.\n")
    if also := [code(one.opts[0]) for one in options if one not in own and not _is_setting(one)]:
        parts.append(f"[Shared](#options-of-several-commands): {', '.join(also)}.\n")
    return "\n".join(part for part in parts if part)


def _shown(command: Any) -> list[Any]:
    return [one for one in command.params if not getattr(one, "hidden", False)]


def _options(command: Any) -> list[Any]:
    shown = [one for one in _shown(command) if one.param_type_name == "option"]
    return [one for one in shown if one.name != "help"]


def _is_setting(option: Any) -> bool:
    """Whether the settings page describes it: a setting of the pool under its own name."""
    declared = Settings.model_fields.get(option.name)
    text = (declared.description if declared else None) or " "
    return _text(option).casefold().startswith(text.casefold()[:9])


def _row(option: Any) -> Row:
    kind, default = _type(option), _default(option)
    names = f"{_names(option)} ({kind})" if kind else _names(option)
    return names, f"{_text(option)} Default: {default}." if default else _text(option)


def _help(command: Any) -> str:
    """The text of ``--help``; an indented paragraph, or one that begins with \\b, is an example."""
    parts = []
    for block in re.split(r"\n\s*\n", (command.help or "").strip("\n")):
        lines = block.splitlines()
        if lines[:1] == ["\b"] or (lines and all(line.startswith("  ") for line in lines)):
            example = textwrap.dedent("\n".join(lines).removeprefix("\b\n"))
            parts.append(f"```text\n{example}\n```\n")
        elif lines:
            parts.append(sentence(_unmarked(" ".join(line.strip() for line in lines))) + "\n")
    return "\n".join(parts)


def _names(option: Any) -> str:
    names = ", ".join(code(name) for name in option.opts)
    others = ", ".join(code(name) for name in option.secondary_opts)
    return f"{names} / {others}" if others else names


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    if name.startswith("["):
        return str(name)
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _type(option: Any) -> str:
    """The type of an option's value, in words; empty for a flag."""
    if option.is_flag:
        return ""
    kind = option.type_descriptor.annotation
    kind = (get_args(kind) or (kind,))[0]
    if get_origin(option.type_descriptor.annotation) is Literal:
        return ", ".join(map(code, get_args(option.type_descriptor.annotation)))
    if issubclass(kind, Enum):
        return ", ".join(code(str(one.value)) for one in kind)
    low, high = option.min, option.max
    parts = [option.metavar or _KINDS[kind]]
    if low is not None:
        parts.append(f"{low:g} or more" if high is None else f"{low:g} to {high:g}")
    parts += ["repeatable"] if option.multiple else []
    return ", ".join(parts)


def _text(parameter: Any) -> str:
    text = _DEFAULT.sub("", _unmarked(getattr(parameter, "help", None) or "").strip())
    text = text if text.endswith((".", "]", ")")) or not text else f"{text}."
    if parameter.required and parameter.param_type_name == "option":
        text += " Required."
    if parameter.envvar:
        text += f" Environment: `{parameter.envvar}`."
    return text.strip()


def _default(option: Any) -> str:
    value = option.default
    if value is None and (told := _DEFAULT.search(_unmarked(option.help or ""))):
        return code(told[1])
    if callable(value) or option.show_default is False or value in (None, False, ""):
        return ""
    if isinstance(value, bool):
        return code(option.opts[0])
    if isinstance(value, list | tuple):
        return code(", ".join(map(str, value)))
    return code(_anywhere(str(getattr(value, "value", value))))


def _unmarked(text: str) -> str:
    """The text without rich's markup."""
    return _anywhere(text.replace(r"\[", "["))


def _anywhere(text: str) -> str:
    """The text with placeholders for values of this machine and user."""
    text = text.replace(f"{default_socket().parent}/", "/run/user/UID/kvrecall/")
    return text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text
