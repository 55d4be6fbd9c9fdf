"""Every command in the documents is run by a test, or its section says what it needs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.commands import ran

from kvrecall.config import RecallSettings

from .pages import PAGES, ROOT, Command, all_commands, commands, named_in_text
from .register import REGISTER, Elsewhere, Needs, Runs
from .stage import Stage, environment

COMMANDS = all_commands()
PAST = "CHANGELOG.md"
"""Says what commands were called then."""


def lines_of(*shapes: str) -> list[tuple[str, str]]:
    """Lines of these shapes, each once, with a page that has it."""
    found = {command.line: command.where for command in COMMANDS if command.shape in shapes}
    return list(found.items())


def runs_of(page: Path) -> list[tuple[Command, Runs]]:
    """What is run for a page: all its lines but those that a page before it has, too."""
    before = {each.line for other in PAGES[: PAGES.index(page)] for each in commands(other)}
    found = [(each, REGISTER.get(each.shape)) for each in commands(page)]
    fresh = any(each.line not in before for each, how in found if isinstance(how, Runs))
    return [
        (each, how)
        for each, how in found
        if isinstance(how, Runs) and fresh and (how.stays or each.line not in before)
    ]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError):
        return False
    return True


COMPUTING = {"CONTRIBUTING.md", "docs/benchmarks.md"}
"""Pages whose commands measure."""


def marked(page: Path) -> Any:
    marks = [pytest.mark.long] if named(page) in COMPUTING else []
    return pytest.param(page, marks=marks, id=named(page))


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if runs_of(page)])
def test_commands_run_as_they_are_written(page: Path) -> None:
    with Stage() as stage:
        for command, how in runs_of(page):
            if not how.needs or is_there(how.needs):
                run(stage, command, how)


def run(stage: Stage, command: Command, how: Runs) -> None:
    if how.before:
        how.before(stage)
    line = command.line + how.more
    for documented, here in how.swaps:
        line = line.replace(documented, here)
    line = stage.ported(line).replace("{folder}", str(stage.folder))
    if how.stays:
        stage.start(command.shape, line, how.stays)
    else:
        said = stage.run(line)
        assert bool(said.strip()) != how.silent, f"{line}: printed {said!r}"
        assert how.says in said, f"{line}: {said[-2000:]}"
    if how.after:
        how.after(stage)


def test_every_command_has_an_entry_in_the_register() -> None:
    unknown = [f"{c.where}: {c.shape}" for c in COMMANDS if c.shape not in REGISTER]
    assert not unknown, "say in lab/tests/docs/register.py what runs it"


def test_what_running_text_names_has_one_too() -> None:
    """Or is the beginning of one: `kvrecall bench --help`."""
    known = {f"{shape} " for shape in REGISTER}
    pages = [page for page in PAGES if page.name != PAST]
    shapes = {(named(page), shape) for page in pages for shape in named_in_text(page)}
    assert not {each for each in shapes if not any(k.startswith(f"{each[1]} ") for k in known)}


def test_every_entry_of_the_register_is_of_a_command() -> None:
    assert not set(REGISTER) - {command.shape for command in COMMANDS}


def test_what_runs_it_elsewhere_is_still_there() -> None:
    for shape, kind in REGISTER.items():
        if isinstance(kind, Elsewhere):
            text = (ROOT / kind.file).read_text()
            assert kind.text in text, f"{kind.file} runs {shape} no more"


def test_a_section_says_what_its_commands_need() -> None:
    for command in COMMANDS:
        kind = REGISTER.get(command.shape)
        if isinstance(kind, Needs) and not any(word in command.section for word in kind.words):
            raise AssertionError(
                f"{command.where}: {command.shape} needs {kind.what}; the section says none of "
                f"{kind.words}"
            )


MAKE = [shape for shape in REGISTER if shape.startswith("make ")]


def test_a_make_target_runs_what_there_is() -> None:
    """By make's dry run."""
    for line, where in lines_of(*MAKE):
        dry = line.partition("|")[0].replace("make", "make --dry-run", 1)
        done = ran("bash", "-c", dry, cwd=ROOT, env=environment())
        assert done.returncode == 0, f"{where}: {done.stderr}"
        for module in re.findall(r"python -m (\S+)", done.stdout):
            assert importlib.util.find_spec(module), module
        for script in re.findall(r"^(scripts/\S+)", done.stdout, re.MULTILINE):
            assert (ROOT / script).is_file(), script
        assert len(done.stdout.splitlines()) == 2, f"{where}: set-up, and one more"


def test_an_extra_that_is_installed_is_one_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line, where in lines_of("pip install"):
        found = re.fullmatch(r"pip install '?(kvrecall|\.)(?:\[(.*)\])?'?( --extra.*)?", line)
        assert found, where
        given = set((found[2] or "").split(",")) - {""}
        assert given <= set(project["optional-dependencies"]), where


def test_vllm_takes_what_it_is_given() -> None:
    """Every line, by vLLM's own parser; its connector is there and takes its settings."""
    pytest.importorskip("vllm")
    from kvrecall.engines.vllm.serving.app import FlexibleArgumentParser, make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser())
    for line, where in lines_of("vllm serve"):
        words = Command(ROOT / where, "", line).words
        config = parser.parse_args(words[words.index("serve") + 1 :]).kv_transfer_config
        if config is not None:
            module = importlib.import_module(config.kv_connector_module_path)
            assert hasattr(module, config.kv_connector)
            assert RecallSettings.from_mapping(config.kv_connector_extra_config, where)
