"""Errors: classes, replies, texts, from where they are declared and raised."""

from __future__ import annotations

from itertools import groupby

from kvrecall.engines.base import Fault
from kvrecall.errors import ExitStatus
from kvrecall.server.replies import ERROR_TYPES, STATUS
from kvrecall_lab.reference.markdown import code, plain, table
from kvrecall_lab.reference.source import below, error_classes, raised

_HEAD = """# Errors

Every error names the setting or thing, its value, the cause and the cure. A miss, a refused
reservation or a late block is not an error: the engine computes the block and counts it
([metrics](metrics.md)).
"""
_TEXTS = """## Texts

Words in capitals stand for values. Texts composed of several parts are omitted.
"""
_UNSEEN = ("testing", "lab", "engines.sglang.peer")


def page() -> str:
    classes = error_classes()
    wrong = below("ConfigError", classes)
    rows = [
        (
            code(one.name),
            code(one.module),
            plain(one.text.split("\n\n")[0]),
            code(str(int(ExitStatus.WRONG_SETTINGS if one.name in wrong else ExitStatus.FAILED))),
        )
        for one in classes
        if not one.module.startswith(_UNSEEN)
    ]
    replies = [
        (str(status), name, ", ".join(code(fault) for fault in Fault if STATUS[fault] == status))
        for status, name in ERROR_TYPES.items()
    ]
    parts = [
        _HEAD,
        "## Classes\n",
        table(("class", "module", "when", "exit code"), rows),
        "## Replies\n\nThe body of a failed request in MindIE's and TGI's forms is "
        '`{"error": TEXT, "error_type": TYPE}`; vLLM\'s routes keep vLLM\'s form. A client that '
        "closes the connection ends its request; the log shows status 499.\n",
        table(("status", "error_type", "kind of failure"), replies),
        _TEXTS,
    ]
    told = [
        one
        for one in raised({one.name for one in classes})
        if not one.module.startswith(_UNSEEN) and one.text.count(" ") > 1
    ]
    for room, errors in groupby(told, lambda one: one.module.split(".")[0]):
        lines = dict.fromkeys((one.text, code(one.kind)) for one in errors)
        parts.append(f"### {room}\n\n{table(('text', 'class'), lines)}")
    return "\n".join(parts)
