"""vLLM's API server: processes that end with it, outputs of its engines, its handlers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic_core import SchemaValidator
from vllm.v1.engine.coordinator import DPCoordinatorProc

from kvrecall.engines.vllm.compat.patches import install
from kvrecall.engines.vllm.compat.processes import end_with_parent
from kvrecall.environment import WITH_PARENT

Handler = TypeVar("Handler")

_run_coordinator = DPCoordinatorProc.run_coordinator


def note_outputs(core: Any, note: Callable[[Any], None]) -> None:
    """Calls ``note`` with all outputs that ``core``, vLLM's client of its engines, receives from
    now on (EngineCoreOutputs, one step of one engine)."""

    def make(fetch: Any) -> Any:
        async def get_output_async() -> Any:
            outputs = await fetch()
            note(outputs)
            return outputs

        return get_output_async

    install("note-outputs", make, core)


def handler_as(handler: Any, kind: type[Handler], **attributes: Any) -> Handler:
    """A copy of ``handler`` of the subclass ``kind``, with more attributes: vLLM has configured it,
    with two dozen arguments that change from version to version and should not be repeated here."""
    twin = kind.__new__(kind)
    vars(twin).update(vars(handler), **attributes)
    return twin


def stop_at_first_error(app: FastAPI) -> None:
    """Makes the routes of ``app`` stop at the first wrong item of a list in a body. Pydantic lists
    every error of every item for every form that the item might have: 20 KB of ``{}`` to
    /v1/responses take a minute of the event loop."""
    for route in app.routes:
        field = getattr(route, "body_field", None)
        adapter = getattr(field, "_type_adapter", None)
        if adapter is not None:
            _stop_early(adapter.core_schema, set())
            adapter.validator = SchemaValidator(adapter.core_schema, _use_prebuilt=False)


def _stop_early(schema: object, seen: set[int]) -> None:
    """In all lists of a schema of pydantic-core, which may contain itself."""
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_early(part, seen)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_early(part, seen)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """vLLM's coordinator of data-parallel replicas, ending with its parent. In this module, so that
    a spawned process finds it."""
    end_with_parent()
    _run_coordinator(*args, **kwargs)


def end_engine_cores_with_parent(environ: MutableMapping[str, str]) -> None:
    """Makes vLLM's engine cores, and their coordinator, end with this process.

    When the API server of vLLM 0.32 is killed (``kill -9``, the OOM killer), its engine core stays,
    idle and unreachable, with all its memory and, with kvrecall, the lock of the disk tier: the
    next server could not start. The coordinator of data-parallel replicas stays, too. Workers end
    with their engine core by themselves.
    """
    environ[WITH_PARENT] = "1"
    install("end-with-parent", lambda plain: run_coordinator)
