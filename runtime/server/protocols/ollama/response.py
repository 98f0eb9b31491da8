"""Answers in Ollama's shape: lines of JSON while they come, or one object.

Knows: the parts of an answer and Ollama's counts. Must not know: HTTP, requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.server.chat.engine import ChatOutput
from plait.runtime.server.chat.parser import ParsedPart
from plait.runtime.server.protocols.openai.chat_response import token_logprobs

EndpointKind = Literal["chat", "generate"]


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaResponseWriter:
    """Writes one answer: `next_line` for what is new, `final_line` for the last line. Reasoning is left out unless told."""

    def __init__(self, kind: EndpointKind, model: str, client: Client, answer: ChatOutput, with_thinking: bool) -> None:
        self._kind, self._model, self._client, self._answer = kind, model, client, answer
        self._with_thinking = with_thinking
        self._open_call: tuple[str, list[str]] | None = None  # its name, and pieces of its arguments
        self._texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._calls: list[dict[str, Any]] = []

    def add_parts(self, parts: Sequence[ParsedPart], *, is_last: bool) -> None:
        """Keeps these parts for the next line. A call is told once it is whole; one that was cut off is not."""
        for part in parts:
            if part.kind == "arguments":
                assert self._open_call is not None
                self._open_call[1].append(part.text)
                continue
            self._end_call()
            if part.kind == "call":
                self._open_call = (part.text, [])
            elif part.kind == "text" or self._with_thinking:
                self._texts[part.kind].append(part.text)
        if is_last:
            self._end_call()

    def next_line(self) -> dict[str, Any] | None:
        """What was taken since the last line; None when that is nothing."""
        if not (self._texts["text"] or self._texts["reasoning"] or self._calls):
            return None
        return {"model": self._model, "created_at": now(), **self._content(), "done": False, **self._logprobs()}

    def final_line(self, result: CallResult) -> dict[str, Any]:
        """The last line, or the whole answer."""
        usage = result.usage
        ns = 1_000_000_000
        return {
            "model": self._model,
            "created_at": now(),
            **self._content(),
            "done": True,
            "done_reason": "length" if result.finish_reason == "length" else "stop",
            "total_duration": int(usage.wall_s * ns),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(max(usage.ttft_s - usage.queue_s, 0.0) * ns),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(usage.wall_s - usage.ttft_s, 0.0) * ns),
            **self._logprobs(),
        }

    def _end_call(self) -> None:
        if self._open_call is None:
            return
        (name, pieces), self._open_call = self._open_call, None
        try:
            arguments = json.loads("".join(pieces))
        except ValueError:
            return
        self._calls.append({"function": {"name": name, "arguments": arguments}})

    def _content(self) -> dict[str, Any]:
        text, reasoning = "".join(self._texts["text"]), "".join(self._texts["reasoning"])
        calls = self._calls
        self._texts, self._calls = {"text": [], "reasoning": []}, []
        if self._kind == "generate":
            return {"response": text} | ({"thinking": reasoning} if reasoning else {})
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _logprobs(self) -> dict[str, Any]:
        taken, self._answer.logprobs = self._answer.logprobs, []
        return {"logprobs": token_logprobs(self._client, taken)} if taken else {}


def load_response(kind: EndpointKind, model: str) -> dict[str, Any]:
    """The answer to a request that asks nothing: the model is there."""
    content = {"response": ""} if kind == "generate" else {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": now(), **content, "done": True, "done_reason": "load"}
