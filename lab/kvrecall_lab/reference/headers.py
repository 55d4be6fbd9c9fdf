"""HTTP headers and fields, from the constants that name them."""

from __future__ import annotations

from kvrecall.router.application import PASSED_ON
from kvrecall_lab.reference.markdown import code, plain, sentence, table
from kvrecall_lab.reference.source import constants

_HEAD = """# HTTP headers and fields

kvrecall's additions to the HTTP interfaces of vLLM and MindIE. vLLM's own headers (`Authorization`,
`X-Request-Id`) are vLLM's.
"""


def page() -> str:
    found = list(constants())
    headers = [
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
            _HEAD,
            table(("header", "from", "meaning"), headers),
            f"The router forwards {passed} of a request to its instances, and no other header.\n",
            "## Fields of a body\n",
            table(("field", "meaning"), fields),
        ]
    )


def _where(module: str) -> str:
    return {"router": "router", "server": "server"}.get(module.partition(".")[0], "server, router")
