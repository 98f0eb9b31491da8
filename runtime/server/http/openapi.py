"""The OpenAPI document: request and answer schemas out of the very structs that decode and encode them.

Knows: msgspec's schemas and FastAPI's document. Must not know: what routes do.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_REF = "#/components/schemas/{name}"
_SCHEMA_PLACEHOLDER = (
    "x-plait-kind"  # stands for a schema until all are known, since two kinds of one name change each other's
)
_documented_types: list[Any] = []

STATUS_DESCRIPTIONS = {
    400: "A parameter is wrong, unknown or not supported; `param` names it.",
    401: "An API key is needed, and none that is known was given.",
    403: "A page of another origin may not do this.",
    404: "There is no such model or path.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "This key has as many requests running as it may; come again after Retry-After seconds.",
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
    request: Any = None,
    answer: Any = None,
    *,
    stream: bool | str = False,
    errors: tuple[int, ...] = tuple(STATUS_DESCRIPTIONS),
    error_body: Any = ErrorBody,
    media_type: str = "application/json",
) -> dict[str, Any]:
    """Keyword arguments for a route: what it takes, what it gives, and its errors.

    `stream`: it may stream events, or lines of the media type named.
    """
    extra: dict[str, Any] = {}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(request)}}}
    content: dict[str, Any] = {media_type: {"schema": _schema(answer) if answer is not None else {}}}
    if stream:
        content[stream if isinstance(stream, str) else "text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[int | str, Any] = {200: {"description": "Done.", "content": content}}
    for status in errors:
        error = {"application/json": {"schema": _schema(error_body)}}
        responses[status] = {"description": STATUS_DESCRIPTIONS[status], "content": error}
    return {"openapi_extra": extra, "responses": responses, "response_model": None}


def _schema(kind: Any) -> Any:
    _documented_types.append(kind)
    return {_SCHEMA_PLACEHOLDER: len(_documented_types) - 1}


def install(app: FastAPI) -> None:
    """Makes `app.openapi()` hold the schemas that routes refer to."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version="1", summary=app.summary, routes=app.routes)
            schemas, components = msgspec.json.schema_components(_documented_types, ref_template=_REF)
            made["paths"] = _with_schemas(made["paths"], schemas)
            made.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _with_schemas(value: Any, schemas: tuple[dict[str, Any], ...]) -> Any:
    """`value`, a part of the document, with the schemas in their places."""
    if isinstance(value, list):
        return [_with_schemas(item, schemas) for item in value]
    if not isinstance(value, dict):
        return value
    if _SCHEMA_PLACEHOLDER in value:
        return schemas[value[_SCHEMA_PLACEHOLDER]]
    return {key: _with_schemas(item, schemas) for key, item in value.items()}
