"""The OpenAPI document: request and answer schemas out of the very structs that decode and encode them.

Knows: msgspec's schemas and FastAPI's document. Must not know: what routes do.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_REF = "#/components/schemas/{name}"
_kinds: list[Any] = []

WHY = {
    400: "A parameter is wrong, unknown or not supported; `param` names it.",
    404: "There is no such model or path.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    500: "A fault of the server.",
    503: "There is no room, or the model is being started; come again after Retry-After seconds.",
    504: "The request's own timeout passed.",
}


class ErrorDetail(msgspec.Struct):
    """What is wrong; `param` is a path into the request's body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer that is not 2xx."""

    error: ErrorDetail


def documented(
    request: Any = None, answer: Any = None, *, stream: bool = False, errors: tuple[int, ...] = tuple(WHY)
) -> dict[str, Any]:
    """Keyword arguments for a route: what it takes, what it gives, and its errors."""
    extra: dict[str, Any] = {}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(request)}}}
    content: dict[str, Any] = {"application/json": {"schema": _schema(answer) if answer is not None else {}}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[int | str, Any] = {200: {"description": "Done.", "content": content}}
    for status in errors:
        error = {"application/json": {"schema": _schema(ErrorBody)}}
        responses[status] = {"description": WHY[status], "content": error}
    return {"openapi_extra": extra, "responses": responses, "response_model": None}


def _schema(kind: Any) -> Any:
    _kinds.append(kind)
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def install(app: FastAPI) -> None:
    """Makes `app.openapi()` hold the schemas that routes refer to."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version="1", summary=app.summary, routes=app.routes)
            _, components = msgspec.json.schema_components(_kinds, ref_template=_REF)
            made.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
