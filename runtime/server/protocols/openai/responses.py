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
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.app_state import AppState, request_id, state_of, tenant_of
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat, prepare_chat
from plait.runtime.server.chat.parser import ParsedPart
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.submission import Submission, submit
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import cancel_on_disconnect, json_response, stream_response
from plait.runtime.server.protocols.openai.chat_response import token_logprobs
from plait.runtime.server.protocols.openai.fields import check_unsupported, remaining_context
from plait.runtime.server.protocols.openai.responses_items import Event, OutputItems
from plait.runtime.server.protocols.openai.responses_object import ResponseBody
from plait.runtime.server.protocols.openai.responses_request import conversation_of
from plait.runtime.server.protocols.openai.responses_types import UNSUPPORTED_FIELDS, ResponsesRequest

router = APIRouter()


@dataclass(frozen=True)
class CheckedResponse:
    """A checked request. `envelope`: what a response says from the beginning."""

    submission: Submission
    prepared: PreparedChat
    envelope: dict[str, Any]
    with_logprobs: bool


@router.post("/v1/responses", **documented(ResponsesRequest, ResponseBody, stream=True))
async def create_response(request: Request) -> Response:
    """The next turn of a conversation, as items. Streams events when `stream` is true."""
    body = await read_json(request, ResponsesRequest)
    state = state_of(request)
    state.check_model(body.model)
    checked = await _check(body, state, tenant_of(request), "resp_" + request_id(request)[4:])
    try:
        if body.stream:
            return await stream_response(request, _events(state.client, checked))
        return json_response(await cancel_on_disconnect(request, _complete_response(state.client, checked)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=checked.prepared.constraint_param) from error


async def _check(body: ResponsesRequest, state: AppState, tenant: str, answer_id: str) -> CheckedResponse:
    check_unsupported(body, UNSUPPORTED_FIELDS)
    conversation = conversation_of(body)
    prepared = await prepare_chat(state.client, conversation)
    context_left = remaining_context(state.client.model.context_length, prepared.prompt_ids, "input")
    with_logprobs = bool(body.include or body.top_logprobs)
    sampling = sampling_params(
        max_tokens=context_left if body.max_output_tokens is None else body.max_output_tokens,
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
    sampling = with_json_completion(sampling, prepared.constraint, body.complete)
    salt, priority = body.cache_salt or "", body.priority or 0
    submission = Submission(prepared.prompt_ids, sampling, prepared.constraint, 1, tenant, salt, priority)
    return CheckedResponse(submission, prepared, _envelope(body, state, answer_id), with_logprobs)


def _envelope(body: ResponsesRequest, state: AppState, answer_id: str) -> dict[str, Any]:
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


def _finished(
    checked: CheckedResponse, client: Client, answer: ChatOutput, items: OutputItems, usage: Usage
) -> dict[str, Any]:
    """The response at its end."""
    cut = answer.finish_reason == "length"
    thoughts = [item["content"][0]["text"] for item in items.output if item["type"] == "reasoning"]
    return {
        **checked.envelope,
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


def _delta_events(
    checked: CheckedResponse, client: Client, answer: ChatOutput, items: OutputItems, parts: list[ParsedPart]
) -> list[Event]:
    """The events for new parts; the logprobs so far go with the last text of them."""
    events: list[Event] = []
    texts = [index for index, part in enumerate(parts) if part.kind == "text"]
    for index, part in enumerate(parts):
        logprobs = None
        if checked.with_logprobs and texts and index == texts[-1]:
            logprobs, answer.logprobs = token_logprobs(client, answer.logprobs), []
        events += items.add(part, logprobs)
    if answer.finish_reason is not None:
        events += items.close("incomplete" if answer.finish_reason == "length" else "completed")
    return events


async def _complete_response(client: Client, checked: CheckedResponse) -> dict[str, Any]:
    async with submit(client, [checked.submission]) as handle:
        (result,) = await handle.results()
        answer, items = ChatOutput(checked.prepared, client, handle.calls[0]), OutputItems()
        _delta_events(checked, client, answer, items, answer.parse_result(result))
        return _finished(checked, client, answer, items, handle.usage())


async def _events(client: Client, checked: CheckedResponse) -> AsyncGenerator[bytes, None]:
    numbered = _EventNumbering()
    async with submit(client, [checked.submission]) as handle:
        answer, items, begun = ChatOutput(checked.prepared, client, handle.calls[0]), OutputItems(), False
        try:
            async with contextlib.aclosing(handle.progress()) as batches:
                async for batch in batches:
                    events: list[Event] = []
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            events.append({"type": kind, "response": checked.envelope})
                    for _, update in batch:
                        events += _delta_events(checked, client, answer, items, answer.parse_update(update))
                    yield numbered.encode(events)
            response = _finished(checked, client, answer, items, handle.usage())
            yield numbered.encode([{"type": f"response.{response['status']}", "response": response}])
        except Exception as error:
            if not begun:
                raise
            told = as_api_error(error, constraint_param=checked.prepared.constraint_param)
            why = {"code": "server_error", "message": told.message}
            response = {**checked.envelope, "status": "failed", "error": why, "output": items.output}
            yield numbered.encode([{"type": "response.failed", "response": response}])


class _EventNumbering:
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
