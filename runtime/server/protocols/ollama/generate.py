"""`/api/chat` and `/api/generate`: Ollama's API; answers are lines of JSON or one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from plait.runtime.chat.parser import ParsedPart
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.server.app_state import request_id, state_of, tenant_of
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import ApiError
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.http.error_bodies import OllamaErrorBody, error_body
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.answer import AnswerWriter, Batch, answer
from plait.runtime.server.protocols.ollama.models import unload, use_ollama_model
from plait.runtime.server.protocols.ollama.request import (
    AnswerFunctionCall,
    AnswerToolCall,
    OllamaChat,
    OllamaChatRequest,
    OllamaGenerated,
    OllamaGenerateRequest,
    OllamaMessage,
    keep_alive_of,
    prepared_of,
    sampling_of,
)
from plait.runtime.server.protocols.shared import ContentLogprob, as_written, extensions, token_logprobs

# -- response -------------------------------------------------------------------------------------
# Writes answers in Ollama's format: lines of JSON for a stream, or one object.

EndpointKind = Literal["chat", "generate"]
Line = OllamaChat | OllamaGenerated

NS_PER_S = 1_000_000_000


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True)
class CheckedRequest:
    """A checked request."""

    kind: EndpointKind
    model: str
    submission: Submission
    prepared: PreparedChat


class OllamaResponseWriter(AnswerWriter):
    """Writes one object, or lines of JSON: `next_line` has the new parts, `final_line` ends the answer."""

    def __init__(self, client: Client, checked: CheckedRequest, handle: RequestHandle, request_id: str) -> None:
        self._client, self._checked, self._handle, self._request_id = client, checked, handle, request_id
        self._output = ChatOutput(checked.prepared, client, handle.calls[0])
        self._open_call: tuple[str, list[str]] | None = None  # its name, and pieces of its arguments
        self._texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._calls: list[AnswerToolCall] = []

    def body(self, results: Sequence[CallResult]) -> Line:
        self.add_parts(self._output.parse_result(results[0]), is_last=True)
        return self.final_line()

    def write(self, batch: Batch) -> bytes:
        for _, update in batch:
            self.add_parts(self._output.parse_update(update), is_last=update.finished)
        line = self.next_line()
        return b"" if line is None else _encode(line)

    def finish(self) -> bytes:
        return _encode(self.final_line())

    def fail(self, error: ApiError) -> bytes:
        return _encode(error_body("/api/", error, self._request_id))

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

    def final_line(self) -> Line:
        """The last line, or the whole answer."""
        result = self._output.call.result(0)
        usage, prompt_ids = result.usage, self._checked.submission.prompt_ids
        weight, cache_miss = extensions(self._client, result, prompt_ids)
        return self._line(
            done=True,
            done_reason="length" if result.finish_reason == "length" else "stop",
            total_duration=int(usage.wall_s * NS_PER_S),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=int(max(usage.ttft_s - usage.queue_s, 0.0) * NS_PER_S),
            eval_count=usage.completion_tokens,
            warnings=self._handle.warnings(more=self._checked.prepared.warnings),
            weight=weight,
            cache_miss=cache_miss,
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
        fields |= {"model": self._checked.model, "created_at": now(), "logprobs": self._take_logprobs()}
        if self._checked.kind == "generate":
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


# -- generate -------------------------------------------------------------------------------------

router = APIRouter()

LINES = "application/x-ndjson"


@router.post("/api/chat", **documented(OllamaChatRequest, OllamaChat, stream=LINES, error_body=OllamaErrorBody))
async def chat(request: Request) -> Response:
    """The next turn of a conversation. Streams lines of JSON unless `stream` is false."""
    return await _answer(request, await read_json(request, OllamaChatRequest, may_be_untyped=True), "chat")


@router.post(
    "/api/generate", **documented(OllamaGenerateRequest, OllamaGenerated, stream=LINES, error_body=OllamaErrorBody)
)
async def generate(request: Request) -> Response:
    """An answer to a prompt. Streams lines of JSON unless `stream` is false."""
    return await _answer(request, await read_json(request, OllamaGenerateRequest, may_be_untyped=True), "generate")


async def _answer(request: Request, body: OllamaChatRequest | OllamaGenerateRequest, kind: EndpointKind) -> Response:
    is_empty = not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt)
    keep_alive_s = keep_alive_of(body.keep_alive, can_unload=state_of(request).pool is not None)
    if is_empty and keep_alive_s == 0:
        unload(request, body.model)
        return json_response(load_response(kind, body.model, "unload"))
    model = await use_ollama_model(request, body.model, keep_alive_s)
    if is_empty:
        return json_response(load_response(kind, body.model))
    checked = await _check(body, kind, model, tenant_of(request))
    return await answer(
        request,
        model,
        [checked.submission],
        lambda handle: OllamaResponseWriter(model.client, checked, handle, request_id(request)),
        stream=body.stream is not False,
        constraint_param=checked.prepared.constraint_param,
        media_type=LINES,
    )


async def _check(
    body: OllamaChatRequest | OllamaGenerateRequest, kind: EndpointKind, model: ServedModel, tenant: str
) -> CheckedRequest:
    client = model.client
    prepared = await prepared_of(body, model)
    sampling = sampling_of(body, client.model.context_length, prepared.prompt_ids)
    sampling = with_json_completion(sampling, prepared.constraint)
    submission = Submission(prepared.prompt_ids, sampling, prepared.constraint, tenant=tenant)
    return CheckedRequest(kind, body.model, submission, prepared)


def _encode(line: Any) -> bytes:
    return msgspec.json.encode(line) + b"\n"
