"""Environment variables, from where they are declared."""

from __future__ import annotations

from kvrecall.environment import VARIABLES
from kvrecall.pool.remote.mooncake.store import ENVIRONMENT
from kvrecall_lab.reference.markdown import code, sentence, table

_HEAD = """# Environment variables

Variables of vLLM, PyTorch and Mooncake that are not named here pass through unchanged. The
variables of retrieval attention, `VLLM_RETRIEVAL_*`, are listed with
[its settings](settings.md#of-retrieval-attention).
"""
_MOONCAKE = """## Of Mooncake's client

Set in the process of Mooncake's client, unless the environment sets them.
"""


def page() -> str:
    rows = [(code(one), sentence(one.text), one.values, one.unset) for one in VARIABLES]
    theirs = [(code(name), code(value)) for name, value in ENVIRONMENT.items()]
    return "\n".join(
        [
            _HEAD,
            table(("variable", "meaning", "value", "without it"), rows),
            _MOONCAKE,
            table(("variable", "set to"), theirs),
        ]
    )
