"""`/v1/responses` and `/v1/responses/input_tokens`: OpenAI's newer API for the next turn of a conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.chat.parser import ParsedPart
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.server.app_state import use_model, use_model_in_turn
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat, prepare_chat
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import ApiError
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.sampling_fields import read_sampling_params
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response, named_sse_event
from plait.runtime.server.protocols.answer import AnswerWriter, Batch, answer
from plait.runtime.server.protocols.openai.responses.request import PlacedItem, ToolTable, conversation_of
from plait.runtime.server.protocols.openai.responses.response import (
    Event,
    Incomplete,
    InputTokens,
    OutputItem,
    OutputItems,
    ReasoningEcho,
    ResponseBody,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
)
from plait.runtime.server.protocols.openai.responses.stored import Keeper, all_items, keeper_of
from plait.runtime.server.protocols.openai.responses.types import LOGPROBS, ResponsePrompt, ResponsesRequest
from plait.runtime.server.protocols.shared import extensions, remaining_context, timeout_of, token_logprobs

router = APIRouter()


@dataclass(frozen=True)
class CheckedResponse:
    """A checked request. `started`: the response object while nothing is generated. `keeper`: keeps the response."""

    submission: Submission
    prepared: PreparedChat
    started: ResponseBody
    with_logprobs: bool
    tools: ToolTable
    keeper: Keeper


@router.post("/v1/responses", **documented(ResponsesRequest, ResponseBody, stream=True))
async def create_response(request: Request) -> Response:
    """The next turn of a conversation, as items. Streams events when `stream` is true."""
    body = await read_json(request, ResponsesRequest)
    model = await use_model_in_turn(request, body.model, timeout_of(body))
    items = await all_items(request, body)
    checked = await _check(body, model, items.items, keeper_of(request, body, items))
    return await answer(
        request,
        model,
        [checked.submission],
        lambda handle: _ResponseWriter(model.client, checked, handle),
        stream=bool(body.stream),
        constraint_param=checked.prepared.constraint_param,
        fail=lambda error: named_sse_event("response.failed", _failed(checked, error, [])),
    )


@router.post("/v1/responses/input_tokens", **documented(ResponsePrompt, InputTokens))
async def count_input_tokens(request: Request) -> Response:
    """The number of tokens of the prompt."""
    body = await read_json(request, ResponsePrompt)
    client = (await use_model(request, body.model)).client
    conversation, _ = conversation_of(body, (await all_items(request, body)).items)
    prepared = await prepare_chat(client, conversation)
    return json_response(InputTokens(len(prepared.prompt_ids), request_warnings()))


async def _check(
    body: ResponsesRequest, model: ServedModel, items: Sequence[PlacedItem], keeper: Keeper
) -> CheckedResponse:
    conversation, tools = conversation_of(body, items)
    untagged = model.settings.untagged_tool_calls
    prepared = await prepare_chat(model.client, conversation, untagged_tool_calls=untagged)
    context_left = remaining_context(model.client.model.context_length, prepared.prompt_ids, "input")
    with_logprobs = bool(LOGPROBS in (body.include or ()) or body.top_logprobs)
    sampling = read_sampling_params(
        body,
        "responses",
        max_tokens=context_left if body.max_output_tokens is None else body.max_output_tokens,
        logprobs=with_logprobs,
    )
    sampling = with_json_completion(sampling, prepared.constraint, body.complete)
    salt, priority = body.cache_salt or "", body.priority or 0
    submission = Submission(prepared.prompt_ids, sampling, prepared.constraint, 1, keeper.tenant, salt, priority)
    return CheckedResponse(submission, prepared, _started(body, keeper), with_logprobs, tools, keeper)


def _started(body: ResponsesRequest, keeper: Keeper) -> ResponseBody:
    text = msgspec.to_builtins(body.text) if body.text else {}
    return ResponseBody(
        id=keeper.response_id,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=ReasoningEcho(body.reasoning.effort if body.reasoning else None),
        store=keeper.store is not None,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": text.get("format") or {"type": "text"}},
        tool_choice=msgspec.to_builtins(body.tool_choice) or "auto",
        tools=[_shown(tool) for tool in msgspec.to_builtins(body.tools or [])],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the response object shows it."""
    return {"strict": None, "parameters": None, **tool} if tool["type"] == "function" else tool


def _failed(checked: CheckedResponse, error: ApiError, output: Sequence[OutputItem]) -> ResponseEvent:
    reason = ResponseError("server_error", error.message)
    response = msgspec.structs.replace(checked.started, status="failed", error=reason, output=output)
    return ResponseEvent(type="response.failed", response=response)


class _ResponseWriter(AnswerWriter):
    """One response, or its numbered events."""

    def __init__(self, client: Client, checked: CheckedResponse, handle: RequestHandle) -> None:
        self._client, self._checked, self._handle = client, checked, handle
        self._output = ChatOutput(checked.prepared, client, handle.calls[0])
        self._items = OutputItems(checked.tools.called)
        self._count = 0

    async def complete(self, handle: RequestHandle) -> ResponseBody:
        response: ResponseBody = await super().complete(handle)
        return self._checked.keeper.keep(response)

    def body(self, results: Sequence[CallResult]) -> ResponseBody:
        self._delta_events(self._output.parse_result(results[0]))
        return self._finished(results[0])

    def write(self, batch: Batch) -> bytes:
        events: list[Event] = []
        if not self._count:
            started = self._checked.started
            events.append(ResponseEvent(type="response.created", response=started))
            events.append(ResponseEvent(type="response.in_progress", response=started))
        for _, update in batch:
            events += self._delta_events(self._output.parse_update(update))
        return self._encode(events)

    def finish(self) -> bytes:
        response = self._checked.keeper.keep(self._finished(self._output.call.result(0)))
        kind: Literal["response.completed", "response.incomplete"] = "response.completed"
        if response.status == "incomplete":
            kind = "response.incomplete"
        return self._encode([ResponseEvent(type=kind, response=response)])

    def fail(self, error: ApiError) -> bytes:
        return self._encode([_failed(self._checked, error, self._items.output)])

    def _delta_events(self, parts: list[ParsedPart]) -> list[Event]:
        """The events for new parts. The logprobs so far go with the last of them that is text."""
        events: list[Event] = []
        texts = [index for index, part in enumerate(parts) if part.kind == "text"]
        for index, part in enumerate(parts):
            logprobs = None
            if self._checked.with_logprobs and texts and index == texts[-1]:
                logprobs, self._output.logprobs = token_logprobs(self._client, self._output.logprobs), []
            events += self._items.add(part, logprobs)
        if self._output.finish_reason is not None:
            events += self._items.close("incomplete" if self._output.finish_reason == "length" else "completed")
        return events

    def _finished(self, result: CallResult) -> ResponseBody:
        """The response object at its end."""
        is_cut = self._output.finish_reason == "length"
        weight, cache_miss = extensions(self._client, result, self._checked.submission.prompt_ids)
        num_reasoning = len(self._client.tokenizer.encode_plain(self._items.reasoning))
        return msgspec.structs.replace(
            self._checked.started,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=Incomplete("max_output_tokens") if is_cut else None,
            output=self._items.output,
            usage=ResponseUsage.of(self._handle.usage(), num_reasoning),
            warnings=self._handle.warnings(more=self._checked.prepared.warnings),
            weight=weight,
            cache_miss=cache_miss,
        )

    def _encode(self, events: list[Event]) -> bytes:
        encoded = []
        for event in events:
            event.sequence_number = self._count
            self._count += 1
            encoded.append(named_sse_event(event.type, event))
        return b"".join(encoded)
