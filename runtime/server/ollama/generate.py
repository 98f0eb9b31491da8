"""`/api/chat` and `/api/generate`: Ollama's requests in, lines of JSON or one object out.

Knows: the order of lines. Must not know: options, templates.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.server.answering import json_answer, stream_answer, unless_gone
from plait.runtime.server.chatting import Answer, Prepared
from plait.runtime.server.error_shapes import OllamaErrorBody, error_body
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.json_body import read_json
from plait.runtime.server.ollama.answering import Kind, Teller, loaded
from plait.runtime.server.ollama.models import check_name
from plait.runtime.server.ollama.request import check_keep_alive, prepared_of, sampling_of, shows_thinking
from plait.runtime.server.ollama.types import OllamaChat, OllamaChatRequest, OllamaGenerated, OllamaGenerateRequest
from plait.runtime.server.openapi import documented
from plait.runtime.server.running import Work, running
from plait.runtime.server.state import State, request_id, state_of, tenant_of
from plait.runtime.server.whole_values import finishing

router = APIRouter()

LINES = "application/x-ndjson"


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    kind: Kind
    model: str
    work: Work
    prepared: Prepared
    with_thinking: bool


@router.post("/api/chat", **documented(OllamaChatRequest, OllamaChat, stream=LINES, error_body=OllamaErrorBody))
async def chat(request: Request) -> Response:
    """The next turn of a conversation. Streams lines of JSON unless `stream` is false."""
    return await _answer(request, await read_json(request, OllamaChatRequest), "chat")


@router.post(
    "/api/generate", **documented(OllamaGenerateRequest, OllamaGenerated, stream=LINES, error_body=OllamaErrorBody)
)
async def generate(request: Request) -> Response:
    """An answer to a prompt. Streams lines of JSON unless `stream` is false."""
    return await _answer(request, await read_json(request, OllamaGenerateRequest), "generate")


async def _answer(request: Request, body: OllamaChatRequest | OllamaGenerateRequest, kind: Kind) -> Response:
    state = state_of(request)
    check_name(state, body.model)
    check_keep_alive(body.keep_alive)
    if not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt):
        return json_answer(loaded(kind, body.model))
    plan = await _plan(body, kind, state, tenant_of(request))
    try:
        if body.stream is False:
            return json_answer(await unless_gone(request, _whole(state.client, plan)))
        return await stream_answer(request, _lines(state.client, plan, request_id(request)), LINES)
    except PlaitError as error:
        raise as_api_error(error, constraint_param=plan.prepared.constraint_param) from error


async def _plan(body: OllamaChatRequest | OllamaGenerateRequest, kind: Kind, state: State, tenant: str) -> Plan:
    client = state.client
    with_thinking = shows_thinking(body, client)
    prepared = await prepared_of(body, client)
    sampling = sampling_of(body, client.model.context_length, prepared.prompt_ids)
    sampling = finishing(sampling, prepared.constraint)
    work = Work(prepared.prompt_ids, sampling, prepared.constraint, tenant=tenant)
    return Plan(kind, body.model, work, prepared, with_thinking)


async def _whole(client: Client, plan: Plan) -> dict[str, Any]:
    async with running(client, [plan.work]) as run:
        (result,) = await run.results()
        answer = Answer(plan.prepared, client, run.calls[0])
        teller = Teller(plan.kind, plan.model, client, answer, plan.with_thinking)
        teller.take(answer.read_whole(result), is_last=True)
        return teller.ending(result)


async def _lines(client: Client, plan: Plan, name: str) -> AsyncGenerator[bytes, None]:
    async with running(client, [plan.work]) as run:
        answer = Answer(plan.prepared, client, run.calls[0])
        teller = Teller(plan.kind, plan.model, client, answer, plan.with_thinking)
        has_begun = False
        try:
            async with contextlib.aclosing(run.progress()) as batches:
                async for batch in batches:
                    for _, news in batch:
                        teller.take(answer.read(news), is_last=news.ended)
                    if line := teller.line():
                        has_begun = True
                        yield msgspec.json.encode(line) + b"\n"
            yield msgspec.json.encode(teller.ending(run.calls[0].result(0))) + b"\n"
        except Exception as error:
            if not has_begun:
                raise
            told = as_api_error(error, constraint_param=plan.prepared.constraint_param)
            yield msgspec.json.encode(error_body("/api/", told, name)) + b"\n"
