"""`/api/chat` and `/api/generate`: Ollama's API; answers are lines of JSON or one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.server.app_state import request_id, state_of, tenant_of
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import ApiError
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.submission import RequestHandle, Submission, submit
from plait.runtime.server.generation.threads import LARGE_TOKENS, run_in_thread_if
from plait.runtime.server.http.error_bodies import OllamaErrorBody, error_body
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.answer import Batch, StreamWriter, respond, stream_events
from plait.runtime.server.protocols.ollama.models import unload, use_ollama_model
from plait.runtime.server.protocols.ollama.request import keep_alive_of, prepared_of, sampling_of
from plait.runtime.server.protocols.ollama.response import EndpointKind, Line, OllamaResponseWriter, load_response
from plait.runtime.server.protocols.ollama.types import (
    OllamaChat,
    OllamaChatRequest,
    OllamaGenerated,
    OllamaGenerateRequest,
)

router = APIRouter()

LINES = "application/x-ndjson"


@dataclass(frozen=True)
class CheckedRequest:
    """A checked request."""

    kind: EndpointKind
    model: str
    submission: Submission
    prepared: PreparedChat


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
    return await respond(
        request,
        stream=body.stream is not False,
        events=lambda: _lines(model.client, checked, request_id(request)),
        complete=lambda: _complete_response(model.client, checked),
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


async def _complete_response(client: Client, checked: CheckedRequest) -> Line:
    async with submit(client, [checked.submission]) as handle:
        (result,) = await handle.results()
        is_large = checked.submission.sampling.logprobs and len(result.token_ids) > LARGE_TOKENS
        return await run_in_thread_if(is_large, _whole_line, client, checked, handle, result)


def _whole_line(client: Client, checked: CheckedRequest, handle: RequestHandle, result: CallResult) -> Line:
    output = ChatOutput(checked.prepared, client, handle.calls[0])
    writer = _writer(client, checked, output)
    writer.add_parts(output.parse_result(result), is_last=True)
    return writer.final_line(result, checked.submission.prompt_ids, handle.warnings(more=checked.prepared.warnings))


def _writer(client: Client, checked: CheckedRequest, output: ChatOutput) -> OllamaResponseWriter:
    return OllamaResponseWriter(checked.kind, checked.model, client, output)


class _LineStream(StreamWriter):
    """Writes an answer as lines of JSON."""

    def __init__(self, client: Client, checked: CheckedRequest, handle: RequestHandle, request_id: str) -> None:
        self._handle, self._request_id, self._prompt_ids = handle, request_id, checked.submission.prompt_ids
        self._output = ChatOutput(checked.prepared, client, handle.calls[0])
        self._writer, self._more_warnings = _writer(client, checked, self._output), checked.prepared.warnings

    def write(self, batch: Batch) -> bytes:
        for _, update in batch:
            self._writer.add_parts(self._output.parse_update(update), is_last=update.finished)
        line = self._writer.next_line()
        return b"" if line is None else _encode(line)

    def finish(self) -> bytes:
        result = self._output.call.result(0)
        warnings = self._handle.warnings(more=self._more_warnings)
        return _encode(self._writer.final_line(result, self._prompt_ids, warnings))

    def fail(self, error: ApiError) -> bytes:
        return _encode(error_body("/api/", error, self._request_id))


def _encode(line: Any) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _lines(client: Client, checked: CheckedRequest, request_id: str) -> AsyncGenerator[bytes, None]:
    return stream_events(
        client,
        [checked.submission],
        lambda handle: _LineStream(client, checked, handle, request_id),
        checked.prepared.constraint_param,
    )
