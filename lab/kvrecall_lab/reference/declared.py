"""Pages of what declarations list, as they stand in the source: errors, exit codes, headers,
environment variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kvrecall.errors
from kvrecall.engines.base import Fault
from kvrecall.environment import VARIABLES
from kvrecall.errors import ConfigError, ExitStatus, KvrecallError
from kvrecall.pool.remote.mooncake.store import ENVIRONMENT
from kvrecall.router.application import PASSED_ON
from kvrecall.server.mindie import schema
from kvrecall.server.replies import ERROR_TYPES, STATUS
from kvrecall_lab.reference.markdown import code, plain, sentence, table


def errors() -> str:
    wrong = {True: ExitStatus.WRONG_SETTINGS, False: ExitStatus.FAILED}
    rows = [
        (code(name), plain((one.__doc__ or "").split("\n\n")[0]), code(str(int(status))))
        for name, one in vars(kvrecall.errors).items()
        if isinstance(one, type) and issubclass(one, KvrecallError)
        for status in [wrong[issubclass(one, ConfigError)]]
    ]
    replies = [
        (str(status), name, ", ".join(code(fault) for fault in Fault if STATUS[fault] == status))
        for status, name in ERROR_TYPES.items()
    ]
    return "\n".join(
        [
            """# Errors

Every error names the setting or thing, its value, the cause and the cure. A miss, a refused
reservation or a late block is not an error: the engine computes the block and counts it
([metrics](metrics.md)). What to do about a message: [Troubleshooting](../troubleshooting.md).

## Classes

The errors that kvrecall raises on purpose, in `kvrecall.errors`; further ones are subclasses.
""",
            table(("class", "when", "exit code"), rows),
            "## Replies\n\nThe body of a failed request in MindIE's and TGI's forms is "
            '`{"error": TEXT, "error_type": TYPE}`; vLLM\'s routes keep vLLM\'s form. A client '
            "that closes the connection ends its request; the log shows status 499.\n",
            table(("status", "error_type", "kind of failure"), replies),
        ]
    )


def exit_codes() -> str:
    rows = [(code(str(int(one))), one.text) for one in ExitStatus]
    head = "# Exit codes\n\nThe same for all commands.\n"
    return "\n".join([head, table(("code", "meaning"), rows)])


def headers() -> str:
    """HTTP headers and fields, from the constants that name them."""
    found = list(constants())
    told = [
        (code(one.value), _where(one.module), sentence(plain(one.text)))
        for one in found
        if one.name.endswith("_HEADER")
    ]
    fields = [
        (code(f"kv_transfer_params.{one.value}"), sentence(plain(one.text)))
        for one in found
        if one.module == "engines.base" and one.text.startswith("Key in")
    ]
    passed = ", ".join(code(name) for name in PASSED_ON)
    return "\n".join(
        [
            """# HTTP headers and fields

kvrecall's additions to the HTTP interfaces of vLLM and MindIE. vLLM's own headers (`Authorization`,
`X-Request-Id`) are vLLM's.
""",
            table(("header", "from", "meaning"), told),
            f"The router forwards {passed} of a request to its instances, and no other header.\n",
            "## Fields of a body\n",
            table(("field", "meaning"), fields),
        ]
    )


def _where(module: str) -> str:
    return {"router": "router", "server": "server"}.get(module.partition(".")[0], "server, router")


def variables() -> str:
    ours = (*VARIABLES, *schema.VARIABLES)
    rows = [(code(one), sentence(one.text), one.values, one.unset) for one in ours]
    theirs = [(code(name), code(value)) for name, value in ENVIRONMENT.items()]
    return "\n".join(
        [
            """# Environment variables

Variables of vLLM, PyTorch and Mooncake that are not named here pass through unchanged. The
variables of retrieval attention, `VLLM_RETRIEVAL_*`, are listed with
[its settings](settings.md#of-retrieval-attention).
""",
            table(("variable", "meaning", "value", "without it"), rows),
            """## Of Mooncake's client

Set in the process of Mooncake's client, unless the environment sets them.
""",
            table(("variable", "set to"), theirs),
        ]
    )


# -- the source -----------------------------------------------------------------------------

SOURCE = Path(kvrecall.__file__).parent


@dataclass(frozen=True, slots=True)
class Constant:
    """A module constant that is a string, with the docstring below it."""

    module: str
    name: str
    value: str
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
