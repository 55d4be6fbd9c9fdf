"""Engines that cannot tell each other apart, so that only the audit stands between them.

``python -m kvrecall.lab.identity.blindfold`` is an engine process as of
``kvrecall.lab.engines.host``, in which every engine has one and the same namespace and every
adapter the same content.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvrecall.block import Namespace
from kvrecall.lab.engines import host

MODULE = __name__

_ONE = Namespace.of({"engine": "any, in the laboratory"})


def put_on() -> None:
    """Takes from the connector in this process what it tells engines and adapters apart by."""
    connector: Any = importlib.import_module("kvrecall.engines.vllm.connector.connector")
    connector.namespace_of = _any_namespace
    connector.Adapters = _AnyAdapters


def _any_namespace(*_: Any, **__: Any) -> Namespace:
    return _ONE


class _AnyAdapters:
    """In the place of ``kvrecall.engines.vllm.identity.namespace.Adapters``."""

    def __init__(self, *_: Any) -> None:
        pass

    def is_known(self, _: Any) -> bool:
        return True

    def identity(self, _: Any) -> str:
        return "any"


if __name__ == "__main__":
    host.main(before_engine=put_on)
