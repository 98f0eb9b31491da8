"""The same error as each protocol writes it, chosen by the path that was asked.

Anthropic: https://docs.anthropic.com/en/api/errors. Ollama: one text. All others: OpenAI's shape.

Knows: paths and shapes of errors. Must not know: what went wrong, frameworks.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

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


class AnthropicErrorBody(msgspec.Struct):
    """Anthropic's shape of every answer that is not 2xx."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    """Ollama's shape of every answer that is not 2xx."""

    error: str


def error_body(path: str, error: ApiError, request_id: str) -> dict[str, Any]:
    """The JSON of `error` for a client that asked `path`.

    >>> error_body("/api/chat", ApiError(400, "no"), "req-1")
    {'error': 'no'}
    """
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return anthropic_error(error, request_id)
    if path.startswith("/api/"):
        return {"error": _message_with_param(error)}
    return error.body()


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """As Anthropic writes it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _message_with_param(error)}, "request_id": request_id}


def _message_with_param(error: ApiError) -> str:
    """The message, with the parameter to blame where only OpenAI's shape would name it."""
    if error.param is None or error.param in error.message:
        return error.message
    return f"'{error.param}': {error.message}"
