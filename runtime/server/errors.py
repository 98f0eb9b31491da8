"""The server's error type, and the mapping of the runtime's errors to it.

An error has the four fields of OpenAI's error object: message, type, param and code. Protocols with another shape build
their own error body from these (`http/error_bodies.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.runtime import errors
from plait.runtime.sampling_params import name_in
from plait.runtime.server.in_flight import current_request

log = logging.getLogger("plait.server")

INVALID, NOT_FOUND, TIMEOUT = "invalid_request_error", "not_found_error", "timeout_error"
OVERLOADED, INTERNAL = "overloaded_error", "server_error"

NO_RETRY = {"x-should-retry": "false"}  # for clients of OpenAI, Anthropic and plait, which repeat after a 503


class ApiError(Exception):
    """An error response. `param` is a path into the request's body, such as `messages[0].content`.

    `details`: what clients of Anthropic's API look for in an error.
    """

    details: Mapping[str, Any] | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The body in OpenAI's shape."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: a value of the request is wrong."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    """400: a parameter of the protocol that this server does not support. `reason` completes "'param' ..."."""
    return ApiError(400, f"'{param}' {reason}", param=param, code="unsupported_parameter")


def unknown_field(param: str, hint: str = "") -> ApiError:
    """400: a field that the request's object does not have. `hint`: what the message adds."""
    return invalid(f"unknown parameter: '{param}'{hint}", param, "unknown_parameter")


def context_limit_message(num_tokens: int) -> str:
    """The sentence by which clients such as litellm recognize a too long prompt; they do not read the error's code."""
    return f"This model's maximum context length is {num_tokens} tokens"


@dataclass(frozen=True)
class ToolParams:
    """The parameters that a constraint on calls came from. triggers: that of the tool which each trigger calls.
    otherwise: that of the answer without calls."""

    triggers: Sequence[str]
    otherwise: str | None = None

    def at(self, where: str | None) -> str | None:
        """The parameter of a place in the `Structural`, a JSON pointer; 'tools' for one of all tools together.

        >>> ToolParams(["tools[0].function.parameters", "tools[1].function.parameters"]).at("/triggers/1/content/type")
        'tools[1].function.parameters'
        """
        _, part, index, *_ = f"{where or ''}///".split("/")
        if part == "triggers" and index.isdecimal() and int(index) < len(self.triggers):
            return self.triggers[int(index)]
        return self.otherwise if part == "otherwise" else "tools"


ConstraintParam = str | ToolParams | None
"""The request's parameter that a failed constraint came from."""


def as_api_error(error: Exception, *, constraint_param: ConstraintParam = None, retry_after_s: int = 1) -> ApiError:
    """Converts any exception to an ApiError. An unexpected one is logged and becomes a 500 without details."""
    if isinstance(error, ApiError):
        return error
    retry = {"Retry-After": str(retry_after_s)}
    if isinstance(error, errors.ContextOverflow):
        return invalid(str(error), code="context_length_exceeded")
    if isinstance(error, errors.ConstraintFailed):
        if isinstance(constraint_param, ToolParams):
            constraint_param = constraint_param.at(error.where)
        return invalid(str(error), constraint_param, "invalid_constraint")
    if isinstance(error, errors.QueueTimeout):  # before its base class
        return ApiError(503, str(error), type=OVERLOADED, param="timeout", code="queue_timeout", headers=retry)
    if isinstance(error, errors.DeadlineExceeded):
        return ApiError(504, str(error), type=TIMEOUT, param="timeout", code="deadline_exceeded")
    if isinstance(error, errors.Overloaded):
        return ApiError(503, str(error), type=OVERLOADED, code="overloaded", headers=retry)
    if isinstance(error, errors.NotRestarted):  # before its base class
        return ApiError(503, str(error), type=OVERLOADED, code="runtime_gone")
    if isinstance(error, errors.RuntimeGone):
        text = "the model's runtime process has ended and is being restarted"
        return ApiError(503, text, type=OVERLOADED, code="runtime_gone", headers=retry)
    if isinstance(error, errors.Aborted):
        return ApiError(503, str(error), type=OVERLOADED, code="aborted", headers=retry)
    if isinstance(error, errors.InputError):
        return invalid(str(error), name_in("openai", error.field) if error.field is not None else None)
    if isinstance(error, errors.CallRejected):
        return invalid(str(error))
    if isinstance(error, errors.UnsupportedModel):
        return invalid(str(error), code="unsupported_by_model")
    record = current_request()
    log.error("%s failed", record.request_id if record is not None else "a request", exc_info=error)
    return ApiError(500, "the server failed on this request; see its log", type=INTERNAL, code="internal_error")


def answered_error(error: Exception, *, constraint_param: ConstraintParam = None, retry_after_s: int = 1) -> ApiError:
    """`as_api_error` of an error that the client gets, as a response or an event: log and metrics have its code."""
    api_error = as_api_error(error, constraint_param=constraint_param, retry_after_s=retry_after_s)
    if (record := current_request()) is not None:
        record.code = record.code or api_error.code
    return api_error
