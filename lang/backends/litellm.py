"""`LiteLLM(model)`: a backend for the services that the package `litellm` supports.

Source: https://docs.litellm.ai/docs/completion/input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from plait.lang.backends.chat_client import ChatClient, TurnRequest, TurnStream
from plait.lang.backends.chat_messages import TURN_MARK_TEMPLATE
from plait.lang.backends.client_packages import client_package, translate_errors
from plait.lang.backends.openai_chat_format import PROTOCOL, chat_body, parse_turn
from plait.lang.backends.remote_client import MAX_CONCURRENCY, RemoteModel, checked_model
from plait.lang.backends.without_runtime import TextCall
from plait.runtime.errors import InputError

DEFAULT_TIMEOUT_S = 600.0


class LiteLLM(ChatClient):
    """A model by its litellm name: "anthropic/...", "vertex_ai/...", "bedrock/...", "openai/..." with `base_url`.
    Needs the package `litellm`, which reads the keys of each service from the environment.

    As with every chat API, a gen must be a complete assistant turn. Constraints and `select` become structured output;
    `get_meta_info` shows this under `method`. litellm itself refuses parameters that a service lacks. `timeout`: in
    seconds, for calls without a timeout of their own.

    >>> plait.set_default_backend(LiteLLM("vertex_ai/gemini-2.5-flash"))         # doctest: +SKIP
    """

    protocol = PROTOCOL
    has_optional_tools = True

    def __init__(
        self,
        model_name: str,
        chat_template: None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        *,
        max_concurrency: int = MAX_CONCURRENCY,
    ) -> None:
        checked_model("LiteLLM", model_name)
        if chat_template is not None:
            raise InputError("LiteLLM: chat_template is not supported: a chat API uses its own")
        self._package = client_package("litellm", "LiteLLM")
        self._timeout_s = timeout
        arguments = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "max_retries": max_retries,
            "extra_headers": dict(default_headers) if default_headers else None,
        }
        self._arguments = {name: value for name, value in arguments.items() if value is not None}
        self.name = f"{model_name} (by litellm)"
        super().__init__(RemoteModel(model_name), TURN_MARK_TEMPLATE, max_concurrency)

    def turn(self, request: TurnRequest, call: TextCall) -> TurnStream:
        body = chat_body(self.model.model_path, request)
        timeout_s = request.params.timeout_s or self._timeout_s
        with translate_errors(self.name):
            stream = self._package.completion(**body, **self._arguments, timeout=timeout_s)
            yield from parse_turn(_chunks(stream, call), request.tools)


def _chunks(stream: Iterable[Any], call: TextCall) -> Iterator[dict[str, Any]]:
    for chunk in stream:
        if call.done():
            return
        yield chunk.model_dump()
