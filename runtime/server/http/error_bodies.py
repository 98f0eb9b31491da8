"""Error bodies in the shape of the protocol that a path belongs to.

Anthropic: https://docs.anthropic.com/en/api/errors. Ollama: a single string. All others: OpenAI's error object.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.server.errors import ApiError

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct):
    """The body of every Anthropic response that is not 2xx."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    """The body of every Ollama response that is not 2xx."""

    error: str


def error_body(path: str, error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the JSON of `error` in the shape of the protocol of `path`.

    >>> error_body("/api/chat", ApiError(400, "no"), "req-1")
    {'error': 'no'}
    """
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return anthropic_error(error, request_id)
    if path.startswith("/api/"):
        return {"error": _message_with_param(error)}
    return error.body()


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the JSON of `error` in Anthropic's shape."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": _message_with_param(error)}
    if error.details is not None:
        body["details"] = error.details
    return {"type": "error", "error": body, "request_id": request_id}


def _message_with_param(error: ApiError) -> str:
    """The message with the wrong parameter's name in it, for shapes without OpenAI's `param`."""
    if error.param is None or error.param in error.message:
        return error.message
    return f"'{error.param}': {error.message}"
