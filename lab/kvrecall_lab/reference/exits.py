"""Exit codes, from their declaration."""

from __future__ import annotations

from kvrecall.errors import ExitStatus
from kvrecall_lab.reference.markdown import code, table

_HEAD = """# Exit codes

The same for all commands.
"""


def page() -> str:
    rows = [(code(str(int(one))), one.text) for one in ExitStatus]
    return "\n".join([_HEAD, table(("code", "meaning"), rows)])
