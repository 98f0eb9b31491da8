"""`Anthropic(model)`: a backend for Anthropic's messages API, through Anthropic's client package.

Source: https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

from typing import Any

from plait.lang.backends.chat_client import ChatClient, TurnEnd, TurnRequest, TurnStream, changed_params
from plait.lang.backends.chat_messages import TURN_MARK_TEMPLATE
from plait.lang.backends.client_packages import client_package, translate_errors
from plait.lang.backends.remote_client import MAX_CONCURRENCY, RemoteModel, checked_model
from plait.lang.backends.without_runtime import TextCall
from plait.runtime.call_reports import Usage
from plait.runtime.errors import CallFailed

_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


class Anthropic(ChatClient):
    """A model of Anthropic's messages API. Needs the package `anthropic`. `client_arguments` are passed to its client:
    api_key (or ANTHROPIC_API_KEY), base_url, max_retries, default_headers and so on.

    As with every chat API, a gen must be a complete assistant turn. Constraints and `select` become structured output;
    `get_meta_info` shows this under `method`. System turns are allowed at the beginning only.

    >>> plait.set_default_backend(Anthropic("claude-sonnet-4-5"))                # doctest: +SKIP
    """

    protocol = "anthropic_client"

    def __init__(self, model_name: str, *, max_concurrency: int = MAX_CONCURRENCY, **client_arguments: Any) -> None:
        checked_model("Anthropic", model_name)
        package = client_package("anthropic", "Anthropic")
        self._client = package.Anthropic(**client_arguments)
        self.name = f"Anthropic's API at {str(self._client.base_url).rstrip('/')}"
        super().__init__(RemoteModel(model_name), TURN_MARK_TEMPLATE, max_concurrency)

    def turn(self, request: TurnRequest, call: TextCall) -> TurnStream:
        body = self._body(request)
        with translate_errors(self.name), self._client.messages.create(**body, stream=True) as events:
            yield from self._read(events, call)

    def _read(self, events: Any, call: TextCall) -> TurnStream:
        counts: dict[str, int] = {}
        reason, matched = None, None
        for event in events:
            if call.done():
                return
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                yield event.delta.text
            elif event.type == "message_start":
                counts |= _counts(event.message.usage)
            elif event.type == "message_delta":
                counts |= _counts(event.usage)
                reason, matched = event.delta.stop_reason, event.delta.stop_sequence
        if reason == "refusal":
            raise CallFailed("the model refused to answer")
        yield TurnEnd(_REASONS.get(str(reason), reason), _usage(counts), matched)

    def _body(self, request: TurnRequest) -> dict[str, Any]:
        params, messages = request.params, request.messages
        num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        if any(message["role"] == "system" for message in messages[num_system:]):
            raise CallFailed(f"{self.name} accepts system turns at the beginning only")
        body: dict[str, Any] = {
            "model": self.model.model_path,
            "messages": messages[num_system:],
            "max_tokens": params.max_tokens,
        }
        if num_system:
            body["system"] = "\n\n".join(message["content"] for message in messages[:num_system])
        # in extra_body, since the package drops arguments that newer models do not have; other servers do have them
        body["extra_body"] = changed_params(params, self.protocol)
        if params.stop:
            body["stop_sequences"] = list(params.stop)
        if request.output_format is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": request.output_format.schema}}
        if params.timeout_s is not None:
            body["timeout"] = params.timeout_s
        return body


def _counts(usage: Any) -> dict[str, int]:
    """Returns the token counts of an event. Later events repeat some counts; the last ones are correct."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    return {name: value for name in names if (value := getattr(usage, name, None)) is not None}


def _usage(counts: dict[str, int]) -> Usage:
    cached = counts.get("cache_read_input_tokens", 0)
    computed = counts.get("input_tokens", 0) + counts.get("cache_creation_input_tokens", 0)
    return Usage(cached + computed, cached, computed, 0, counts.get("output_tokens", 0))
