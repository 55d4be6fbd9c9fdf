"""OpenAPI descriptions of request bodies that the routes parse themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]


@cache
def described(*forms: type[BaseModel]) -> Json:
    """``openapi_extra`` of a route whose body has one of these forms."""
    schemas = [inlined(form.model_json_schema()) for form in forms]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def inlined(schema: Json) -> Json:
    """``schema`` without ``$defs``: each reference is replaced by what it names. A reference in a
    part of an OpenAPI document would be looked up in the whole of it."""
    definitions = schema.get("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolved(definitions[part["$ref"].rsplit("/", 1)[1]])
        return {key: resolved(value) for key, value in part.items() if key != "$defs"}

    found: Json = resolved(schema)
    return found
