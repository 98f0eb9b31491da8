"""`OpenAI(model)`: a backend for OpenAI's chat API and for servers that are compatible with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from plait.lang.backends.chat_client import ChatClient, TurnRequest, TurnStream
from plait.lang.backends.chat_messages import TURN_MARK_TEMPLATE
from plait.lang.backends.http_client import JsonHttp
from plait.lang.backends.openai_chat_format import PROTOCOL, chat_body, parse_turn
from plait.lang.backends.remote_client import MAX_CONCURRENCY, RemoteModel, checked_model
from plait.lang.backends.remote_session import RemoteCall
from plait.runtime.errors import InputError

_UNSUPPORTED_ARGUMENTS = {
    "is_chat_model": "it uses the chat API only; for plain text use RuntimeEndpoint or Runtime",
    "chat_template": "a chat API uses its own template",
    "is_azure": "give base_url= of the resource's OpenAI-compatible address instead",
}


class OpenAI(ChatClient):
    """A model of OpenAI's chat API, or with `base_url` of a compatible server: vLLM, Ollama, LiteLLM's proxy, plait.

    A gen must be a complete assistant turn: text before or between gens inside a turn is refused. Constraints become
    structured output. So does `select`, because choices cannot be scored; `get_meta_info` shows this under `method`.
    Needs no package. `organization` and `default_headers` are sent as headers.

    >>> plait.set_default_backend(OpenAI("gpt-4o-mini"))             # doctest: +SKIP
    """

    protocol = PROTOCOL

    def __init__(
        self,
        model_name: str,
        base_url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        *,
        organization: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        max_concurrency: int = MAX_CONCURRENCY,
        **others: Any,
    ) -> None:
        checked_model("OpenAI", model_name)
        _check_others(others)
        key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY")
        if key is None and "api.openai.com" in base_url:
            raise InputError("OpenAI needs a key: api_key=... or the environment variable OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if organization is not None:
            headers["openai-organization"] = organization
        self._http = JsonHttp(base_url, headers | dict(default_headers or {}))
        self._limit = "max_completion_tokens" if "api.openai.com" in base_url else "max_tokens"
        self.name = f"the chat API at {self._http.base_url}"
        super().__init__(RemoteModel(model_name), TURN_MARK_TEMPLATE, max_concurrency)

    def turn(self, request: TurnRequest, call: RemoteCall) -> TurnStream:
        body = chat_body(self.model.model_path, request, self._limit)
        yield from parse_turn(self._http.events("/chat/completions", body, request.timeout_s, call.done))


def _check_others(others: Mapping[str, Any]) -> None:
    """Checks SGLang's other arguments. Values that change nothing are accepted."""
    for name, value in others.items():
        if name not in _UNSUPPORTED_ARGUMENTS:
            raise InputError(f"OpenAI has no argument {name!r}")
        if value not in (None, name == "is_chat_model"):
            raise InputError(f"OpenAI: {name}={value!r:.40} is not supported: {_UNSUPPORTED_ARGUMENTS[name]}")
