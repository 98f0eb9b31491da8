"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API for the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from msgspec import UnsetType
from starlette.responses import Response

from plait.runtime.call_reports import Usage
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.server.app_state import request_id, tenant_of, use_model, use_model_in_turn
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat, prepare_chat
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import ApiError
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.cache_miss import CacheMissReport, cache_miss_report
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.http.error_bodies import AnthropicErrorBody, anthropic_error
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import KeepAlive, json_response, named_sse_event
from plait.runtime.server.protocols.answer import AnswerWriter, Batch, answer
from plait.runtime.server.protocols.anthropic.request import conversation_of, sampling_of
from plait.runtime.server.protocols.anthropic.response import (
    AnswerUsage,
    AnthropicMessage,
    ContentBlocks,
    Event,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    Stop,
    TokenCount,
    stop_reason_of,
)
from plait.runtime.server.protocols.anthropic.types import MessagesRequest, PromptFields
from plait.runtime.server.protocols.shared import remaining_context

router = APIRouter()

PING = KeepAlive(named_sse_event("ping", Ping()))


@dataclass(frozen=True)
class CheckedMessage:
    """A checked request. `started`: the message while nothing is generated."""

    submission: Submission
    prepared: PreparedChat
    started: AnthropicMessage
    request_id: str


@router.post(
    "/v1/messages", **documented(MessagesRequest, AnthropicMessage, stream=True, error_body=AnthropicErrorBody)
)
async def create_message(request: Request) -> Response:
    """The next turn of a conversation. Streams when `stream` is true."""
    body = await read_json(request, MessagesRequest)
    model = await use_model_in_turn(request, body.model)
    checked = await _check(body, model, request)
    return await answer(
        request,
        model,
        [checked.submission],
        lambda handle: _MessageWriter(model.client, checked, handle),
        stream=bool(body.stream),
        constraint_param=checked.prepared.constraint_param,
        fail=lambda error: _error_event(error, checked),
        keep_alive=PING,
    )


@router.post("/v1/messages/count_tokens", **documented(PromptFields, TokenCount, error_body=AnthropicErrorBody))
async def count_tokens(request: Request) -> Response:
    """The number of tokens of the prompt."""
    body = await read_json(request, PromptFields)
    client = (await use_model(request, body.model)).client
    prepared = await prepare_chat(client, conversation_of(body))
    return json_response(TokenCount(len(prepared.prompt_ids), request_warnings()))


async def _check(body: MessagesRequest, model: ServedModel, request: Request) -> CheckedMessage:
    client, sampling = model.client, sampling_of(body)
    untagged = model.settings.untagged_tool_calls
    prepared = await prepare_chat(client, conversation_of(body), untagged_tool_calls=untagged)
    remaining_context(client.model.context_length, prepared.prompt_ids, "messages")
    sampling = with_json_completion(sampling, prepared.constraint)
    submission = Submission(prepared.prompt_ids, sampling, prepared.constraint, tenant=tenant_of(request))
    name = request_id(request)
    usage = AnswerUsage.of(Usage(prompt_tokens=len(prepared.prompt_ids)))
    started = AnthropicMessage(f"msg_{name.removeprefix('req-')}", body.model, usage)
    return CheckedMessage(submission, prepared, started, name)


class _MessageWriter(AnswerWriter):
    """One message, or its events."""

    def __init__(self, client: Client, checked: CheckedMessage, handle: RequestHandle) -> None:
        self._client, self._checked, self._handle, self._has_begun = client, checked, handle, False
        self._output = ChatOutput(checked.prepared, client, handle.calls[0])
        self._blocks = ContentBlocks()

    def body(self, results: Sequence[CallResult]) -> AnthropicMessage:
        self._blocks.add(self._output.parse_result(results[0]))
        stop, usage, warnings, cache_miss = self._end(results[0])
        return msgspec.structs.replace(
            self._checked.started,
            content=self._blocks.content(),
            usage=usage,
            warnings=warnings,
            cache_miss=cache_miss,
            **msgspec.structs.asdict(stop),
        )

    def _end(self, result: CallResult) -> tuple[Stop, AnswerUsage, list[str] | UnsetType, CacheMissReport | UnsetType]:
        """What a message ends with."""
        made_calls = self._output.finish_reason == "tool_calls"
        return (
            stop_reason_of(result, self._checked.submission.sampling.max_tokens, made_calls),
            AnswerUsage.of(self._handle.usage()),
            self._handle.warnings(more=self._checked.prepared.warnings),
            cache_miss_report(self._client, result, self._checked.submission.prompt_ids),
        )

    def write(self, batch: Batch) -> bytes:
        events: list[Event] = [] if self._has_begun else [MessageStart(self._checked.started), Ping()]
        self._has_begun = True
        for _, update in batch:
            events += self._blocks.add(self._output.parse_update(update))
        return _encode(events)

    def finish(self) -> bytes:
        delta = MessageDelta(*self._end(self._handle.calls[0].result(0)))
        return _encode([*self._blocks.finish(), delta, MessageStop()])

    def fail(self, error: ApiError) -> bytes:
        return _error_event(error, self._checked)


def _error_event(error: ApiError, checked: CheckedMessage) -> bytes:
    return named_sse_event("error", anthropic_error(error, checked.request_id))


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join([named_sse_event(str(event.__struct_config__.tag), event) for event in events])
