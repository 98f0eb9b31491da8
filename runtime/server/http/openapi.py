"""The OpenAPI document, with schemas generated from the structs that decode requests and encode responses."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from plait.runtime.server.fields.request_fields import ENDPOINTS, rows_of, with_parts

_REF = "#/components/schemas/{name}"
# Stands for a schema until all types are known: two types of the same name change each other's component names.
_SCHEMA_PLACEHOLDER = "x-plait-kind"
_documented_types: list[Any] = []

STATUS_DESCRIPTIONS = {
    400: "A parameter is wrong, unknown or not supported; `param` names it.",
    401: "The API key is missing or unknown.",
    403: "The host, or the origin of the page, is not allowed; or the key stores as much as it may.",
    404: "There is no such model, file, batch or path.",
    408: "The body did not arrive in time.",
    409: "The file or batch is not in a state that allows this.",
    413: "The body is too large.",
    415: "The body is not of the right type, for most paths application/json.",
    429: "This key has reached its limit of running requests; retry after Retry-After seconds.",
    500: "An error in the server.",
    503: "The server is at capacity, or the model is being started; retry after Retry-After seconds.",
    504: "The request exceeded its own timeout.",
    507: "The server cannot store this: its disk is full, or does not work.",
}


DEFAULT_ERRORS = tuple(status for status in STATUS_DESCRIPTIONS if status not in (409, 507))


class ErrorDetail(msgspec.Struct):
    """The error. `param` is a path into the request's body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every response that is not 2xx."""

    error: ErrorDetail


def documented(
    request: Any = None,
    answer: Any = None,
    *,
    stream: bool | str = False,
    errors: tuple[int, ...] = DEFAULT_ERRORS,
    error_body: Any = ErrorBody,
    media_type: str = "application/json",
    request_media_type: str = "application/json",
    query: type[msgspec.Struct] | None = None,
) -> dict[str, Any]:
    """Returns keyword arguments that document a route: the types of its request, response and errors.

    `stream`: the route may also stream server-sent events (True) or lines of the given media type. `query`: a struct of
    its query parameters.
    """
    extra: dict[str, Any] = {}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {request_media_type: {"schema": _schema(request)}}}
    if query is not None:
        extra["parameters"] = [
            {"name": field.name, "in": "query", "required": False, "schema": _schema(field.type)}
            for field in msgspec.structs.fields(query)
        ]
    content: dict[str, Any] = {media_type: {"schema": _schema(answer) if answer is not None else {}}}
    if stream:  # of events: OpenAPI 3.1 does not say whether a schema is of the whole stream or of an event
        content |= {stream: {"schema": {"type": "string"}}} if isinstance(stream, str) else {"text/event-stream": {}}
    responses: dict[int | str, Any] = {200: {"description": "Done.", "content": content}}
    for status in errors:
        error = {"application/json": {"schema": _schema(error_body)}}
        responses[status] = {"description": STATUS_DESCRIPTIONS[status], "content": error}
    return {"openapi_extra": extra, "responses": responses, "response_model": None}


def _schema(kind: Any) -> Any:
    """Returns a placeholder for the schema of `kind`."""
    _documented_types.append(kind)
    return {_SCHEMA_PLACEHOLDER: len(_documented_types) - 1}


def install(app: FastAPI) -> None:
    """Makes `app.openapi()` return the document with the schemas of all documented types."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            openapi = get_openapi(title=app.title, version="1", summary=app.summary, routes=app.routes)
            schemas, components = msgspec.json.schema_components(_documented_types, ref_template=_REF)
            for part in {part for kind in _documented_types for part in with_parts(kind)}:
                _add_rows(components[part.__name__], part)
            openapi["paths"] = _with_schemas(openapi["paths"], schemas)
            openapi.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = openapi
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _add_rows(schema: dict[str, Any], kind: Any) -> None:
    """Adds the fields that are known and not read to the schema of a request, or of an object in it."""
    for name, (row, is_advice) in rows_of(kind.field_table).items():
        if name not in kind.__struct_fields__:
            text = "Listed in `warnings`" if is_advice else "Refused"
            but = f"; {', '.join(msgspec.json.encode(value).decode() for value in row.neutral)} passes"
            text += f": {row.reason}" if row.reason else ""
            schema["properties"][name] = {"description": f"{text}{but if row.neutral else ''}."}
    if kind.field_table in ENDPOINTS:
        schema["additionalProperties"] = True  # listed in `warnings`


def _with_schemas(value: Any, schemas: tuple[dict[str, Any], ...]) -> Any:
    """Returns a part of the document with its placeholders replaced by schemas."""
    if isinstance(value, list):
        return [_with_schemas(item, schemas) for item in value]
    if not isinstance(value, dict):
        return value
    if _SCHEMA_PLACEHOLDER in value:
        return schemas[value[_SCHEMA_PLACEHOLDER]]
    return {key: _with_schemas(item, schemas) for key, item in value.items()}
