"""`OpenAI(model)`: a backend for OpenAI's chat API and for servers that are compatible with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from plait.lang.backends.chat_client import ChatClient, TurnRequest, TurnStream
from plait.lang.backends.chat_messages import TURN_MARK_TEMPLATE
from plait.lang.backends.http_client import JsonHttp, checked_extra_body
from plait.lang.backends.openai_chat_format import PROTOCOL, chat_body, parse_turn
from plait.lang.backends.remote_client import MAX_CONCURRENCY, RemoteModel, checked_model
from plait.lang.backends.without_runtime import TextCall
from plait.runtime.errors import InputError
from plait.runtime.sampling_params import NAMES

_OWN_FIELDS = frozenset(NAMES[PROTOCOL].values()) - {"timeout"} | {
    *("model", "messages", "stream", "stream_options", "n", "max_completion_tokens", "response_format"),
    *("tools", "tool_choice", "parallel_tool_calls", "continue_final_message", "add_generation_prompt"),
}
_UNSUPPORTED_ARGUMENTS = {
    "is_chat_model": "it uses the chat API only; for plain text use RuntimeEndpoint or Runtime",
    "chat_template": "a chat API uses its own template",
    "is_azure": "give base_url= of the resource's OpenAI-compatible address instead",
}


class OpenAI(ChatClient):
    """A model of OpenAI's chat API, or with `base_url` of a compatible server: vLLM, Ollama, LiteLLM's proxy, plait.

    Constraints become structured output. So does `select`, because choices cannot be scored; `get_meta_info` shows this
    under `method`. `tools` with `tool_choice="auto"` are the API's own. Needs no package.

    - `organization`, `default_headers`: sent as headers.
    - `extra_body`: further fields of every request, such as `{"top_k": 20}` or `{"chat_template_kwargs": {...}}`.
    - `continue_final_message`: whether the server continues a turn that the program has begun, `assistant("It is " +
      gen("x"))`; by default True but for OpenAI's own service, which cannot. It is asked by the fields
      `continue_final_message` and `add_generation_prompt` of vLLM, SGLang and plait. Such gens have no constraint.

    >>> plait.set_default_backend(OpenAI("gpt-4o-mini"))             # doctest: +SKIP
    """

    protocol = PROTOCOL
    has_optional_tools = True

    def __init__(
        self,
        model_name: str,
        base_url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        *,
        organization: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        max_concurrency: int = MAX_CONCURRENCY,
        extra_body: Mapping[str, Any] | None = None,
        continue_final_message: bool | None = None,
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
        is_openai = "api.openai.com" in base_url
        self._limit = "max_completion_tokens" if is_openai else "max_tokens"
        self._extra_body = checked_extra_body("OpenAI: extra_body", extra_body, _OWN_FIELDS)
        self.continues_turns = not is_openai if continue_final_message is None else bool(continue_final_message)
        self.name = f"the chat API at {self._http.base_url}"
        super().__init__(RemoteModel(model_name), TURN_MARK_TEMPLATE, max_concurrency)

    def turn(self, request: TurnRequest, call: TextCall) -> TurnStream:
        body = self._extra_body | chat_body(self.model.model_path, request, self._limit)
        chunks = self._http.events("/chat/completions", body, request.params.timeout_s, call.done)
        yield from parse_turn(chunks, request.tools)


def _check_others(others: Mapping[str, Any]) -> None:
    """Checks SGLang's other arguments. Values that change nothing are accepted."""
    for name, value in others.items():
        if name not in _UNSUPPORTED_ARGUMENTS:
            raise InputError(f"OpenAI has no argument {name!r}")
        if value not in (None, name == "is_chat_model"):
            raise InputError(f"OpenAI: {name}={value!r:.40} is not supported: {_UNSUPPORTED_ARGUMENTS[name]}")
