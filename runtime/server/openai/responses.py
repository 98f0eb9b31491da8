"""`/v1/responses`: OpenAI's newer form of a conversation's next turn. Nothing is stored.

Knows: OpenAI's response object and its events. Must not know: templates, formats, sockets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.messages import Usage
from plait.runtime.sampling import sampling_params
from plait.runtime.server.answering import json_answer, stream_answer, unless_gone
from plait.runtime.server.chatting import Answer, Prepared, prepare
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.json_body import read_json
from plait.runtime.server.openai.chat_answers import token_logprobs
from plait.runtime.server.openai.fields import refuse, room_for_answer
from plait.runtime.server.openai.responses_answers import ResponseBody
from plait.runtime.server.openai.responses_items import Event, Items
from plait.runtime.server.openai.responses_request import conversation_of
from plait.runtime.server.openai.responses_types import REFUSED, ResponsesRequest
from plait.runtime.server.openapi import documented
from plait.runtime.server.reading import Part
from plait.runtime.server.running import Work, running
from plait.runtime.server.state import State, request_id, state_of, tenant_of
from plait.runtime.server.whole_values import finishing

router = APIRouter()


@dataclass(frozen=True)
class Plan:
    """A checked request. `head`: what a response says from the beginning."""

    work: Work
    prepared: Prepared
    head: dict[str, Any]
    with_logprobs: bool


@router.post("/v1/responses", **documented(ResponsesRequest, ResponseBody, stream=True))
async def create_response(request: Request) -> Response:
    """The next turn of a conversation, as items. Streams events when `stream` is true."""
    body = await read_json(request, ResponsesRequest)
    state = state_of(request)
    state.check_model(body.model)
    plan = await _plan(body, state, tenant_of(request), "resp_" + request_id(request)[4:])
    try:
        if body.stream:
            return await stream_answer(request, _events(state.client, plan))
        return json_answer(await unless_gone(request, _whole(state.client, plan)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=plan.prepared.constraint_param) from error


async def _plan(body: ResponsesRequest, state: State, tenant: str, answer_id: str) -> Plan:
    refuse(body, REFUSED)
    asked = conversation_of(body)
    prepared = await prepare(state.client, asked)
    room = room_for_answer(state.client.model.context_length, prepared.prompt_ids, "input")
    with_logprobs = bool(body.include or body.top_logprobs)
    sampling = sampling_params(
        max_tokens=room if body.max_output_tokens is None else body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=body.stop,
        timeout_s=body.timeout,
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs or 0,
    )
    sampling = finishing(sampling, prepared.constraint, body.complete)
    salt, priority = body.cache_salt or "", body.priority or 0
    work = Work(prepared.prompt_ids, sampling, prepared.constraint, 1, tenant, salt, priority)
    return Plan(work, prepared, _head(body, state, answer_id), with_logprobs)


def _head(body: ResponsesRequest, state: State, answer_id: str) -> dict[str, Any]:
    text = msgspec.to_builtins(body.text) if body.text else {}
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": state.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in msgspec.to_builtins(body.tools or [])],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _finished(plan: Plan, client: Client, answer: Answer, items: Items, usage: Usage) -> dict[str, Any]:
    """The response at its end."""
    cut = answer.finish_reason == "length"
    thoughts = [item["content"][0]["text"] for item in items.output if item["type"] == "reasoning"]
    return {
        **plan.head,
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items.output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": len(client.tokenizer.encode_plain("".join(thoughts)))},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _told(plan: Plan, client: Client, answer: Answer, items: Items, parts: list[Part]) -> list[Event]:
    """The events for new parts; the logprobs so far go with the last text of them."""
    events: list[Event] = []
    texts = [index for index, part in enumerate(parts) if part.kind == "text"]
    for index, part in enumerate(parts):
        logprobs = None
        if plan.with_logprobs and texts and index == texts[-1]:
            logprobs, answer.logprobs = token_logprobs(client, answer.logprobs), []
        events += items.add(part, logprobs)
    if answer.finish_reason is not None:
        events += items.close("incomplete" if answer.finish_reason == "length" else "completed")
    return events


async def _whole(client: Client, plan: Plan) -> dict[str, Any]:
    async with running(client, [plan.work]) as run:
        (result,) = await run.results()
        answer, items = Answer(plan.prepared, client, run.calls[0]), Items()
        _told(plan, client, answer, items, answer.read_whole(result))
        return _finished(plan, client, answer, items, run.usage())


async def _events(client: Client, plan: Plan) -> AsyncGenerator[bytes, None]:
    numbered = _Numbered()
    async with running(client, [plan.work]) as run:
        answer, items, begun = Answer(plan.prepared, client, run.calls[0]), Items(), False
        try:
            async with contextlib.aclosing(run.progress()) as batches:
                async for batch in batches:
                    events: list[Event] = []
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            events.append({"type": kind, "response": plan.head})
                    for _, news in batch:
                        events += _told(plan, client, answer, items, answer.read(news))
                    yield numbered.encode(events)
            response = _finished(plan, client, answer, items, run.usage())
            yield numbered.encode([{"type": f"response.{response['status']}", "response": response}])
        except Exception as error:
            if not begun:
                raise
            told = as_api_error(error, constraint_param=plan.prepared.constraint_param)
            why = {"code": "server_error", "message": told.message}
            response = {**plan.head, "status": "failed", "error": why, "output": items.output}
            yield numbered.encode([{"type": "response.failed", "response": response}])


class _Numbered:
    """Events of one stream, counted."""

    def __init__(self) -> None:
        self._count = 0

    def encode(self, events: list[Event]) -> bytes:
        lines = []
        for event in events:
            data = msgspec.json.encode({**event, "sequence_number": self._count})
            lines.append(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data))
            self._count += 1
        return b"".join(lines)
