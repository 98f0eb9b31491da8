"""Writes answers in Ollama's format: lines of JSON for a stream, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from plait.runtime.chat.parser import ParsedPart
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.server.chat.engine import ChatOutput
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.cache_miss import cache_miss_report
from plait.runtime.server.protocols.ollama.types import (
    AnswerFunctionCall,
    AnswerToolCall,
    OllamaChat,
    OllamaGenerated,
    OllamaMessage,
)
from plait.runtime.server.protocols.shared import ContentLogprob, as_written, importance_weight, token_logprobs

EndpointKind = Literal["chat", "generate"]
Line = OllamaChat | OllamaGenerated

NS_PER_S = 1_000_000_000


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaResponseWriter:
    """Writes one answer: `next_line` has the new parts, `final_line` ends it."""

    def __init__(self, kind: EndpointKind, model: str, client: Client, output: ChatOutput) -> None:
        self._kind, self._model, self._client, self._output = kind, model, client, output
        self._open_call: tuple[str, list[str]] | None = None  # its name, and pieces of its arguments
        self._texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._calls: list[AnswerToolCall] = []

    def add_parts(self, parts: Sequence[ParsedPart], *, is_last: bool) -> None:
        """Keeps the parts for the next line. A call is written once it is complete; one that was cut off is dropped."""
        for part in parts:
            if part.kind == "arguments":
                assert self._open_call is not None
                self._open_call[1].append(part.text)
                continue
            self._end_call()
            if part.kind == "call":
                self._open_call = (part.text, [])
            else:
                self._texts[part.kind].append(part.text)
        if is_last:
            self._end_call()

    def next_line(self) -> Line | None:
        """The parts since the last line; None without any."""
        if not (self._texts["text"] or self._texts["reasoning"] or self._calls):
            return None
        return self._line(done=False)

    def final_line(
        self, result: CallResult, prompt_ids: Sequence[int], warnings: list[str] | UnsetType = UNSET
    ) -> Line:
        """The last line, or the whole answer."""
        usage = result.usage
        return self._line(
            done=True,
            done_reason="length" if result.finish_reason == "length" else "stop",
            total_duration=int(usage.wall_s * NS_PER_S),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=int(max(usage.ttft_s - usage.queue_s, 0.0) * NS_PER_S),
            eval_count=usage.completion_tokens,
            warnings=warnings,
            weight=importance_weight(result),
            cache_miss=cache_miss_report(self._client, result, prompt_ids),
            eval_duration=int(max(usage.wall_s - usage.ttft_s, 0.0) * NS_PER_S),
        )

    def _end_call(self) -> None:
        if self._open_call is None:
            return
        (name, pieces), self._open_call = self._open_call, None
        arguments = as_written("".join(pieces))
        if arguments is not None:
            self._calls.append(AnswerToolCall(AnswerFunctionCall(name, arguments)))

    def _line(self, **fields: Any) -> Line:
        """A line with the parts, which are forgotten."""
        text, reasoning = "".join(self._texts["text"]), "".join(self._texts["reasoning"]) or UNSET
        calls = self._calls or UNSET
        self._texts, self._calls = {"text": [], "reasoning": []}, []
        fields |= {"model": self._model, "created_at": now(), "logprobs": self._take_logprobs()}
        if self._kind == "generate":
            return OllamaGenerated(response=text, thinking=reasoning, **fields)
        return OllamaChat(message=OllamaMessage(text, reasoning, calls), **fields)

    def _take_logprobs(self) -> list[ContentLogprob] | UnsetType:
        entries, self._output.logprobs = self._output.logprobs, []
        return token_logprobs(self._client, entries) if entries else UNSET


def load_response(kind: EndpointKind, model: str, reason: Literal["load", "unload"] = "load") -> Line:
    """The answer to a request without a prompt: the model is loaded, or it is unloaded."""
    fields: dict[str, Any] = {"model": model, "created_at": now(), "done": True, "done_reason": reason}
    fields["warnings"] = request_warnings()
    if kind == "generate":
        return OllamaGenerated(response="", **fields)
    return OllamaChat(message=OllamaMessage(""), **fields)
