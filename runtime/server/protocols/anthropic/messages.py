"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API for the next turn of a conversation."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.messages import Usage
from plait.runtime.server.app_state import AppState, request_id, state_of, tenant_of
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat, prepare_chat
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.submission import Submission, submit
from plait.runtime.server.http.error_bodies import AnthropicErrorBody, anthropic_error
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import cancel_on_disconnect, json_response, named_sse_event, stream_response
from plait.runtime.server.protocols.anthropic.content_blocks import (
    AnswerUsage,
    AnthropicMessage,
    ContentBlocks,
    SseEvent,
    TokenCount,
    stop_reason_of,
)
from plait.runtime.server.protocols.anthropic.request import conversation_of, sampling_of, shows_thinking
from plait.runtime.server.protocols.anthropic.types import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_MESSAGE_FIELDS,
    MessagesRequest,
    PromptFields,
)
from plait.runtime.server.protocols.shared import check_unsupported, remaining_context

router = APIRouter()


@dataclass(frozen=True)
class CheckedMessage:
    """A checked request. `started`: the message while nothing is generated."""

    submission: Submission
    prepared: PreparedChat
    started: AnthropicMessage
    with_thinking: bool
    request_id: str


@router.post(
    "/v1/messages", **documented(MessagesRequest, AnthropicMessage, stream=True, error_body=AnthropicErrorBody)
)
async def create_message(request: Request) -> Response:
    """The next turn of a conversation. Streams when `stream` is true."""
    body = await read_json(request, MessagesRequest)
    state = state_of(request)
    state.check_model(body.model)
    checked = await _check(body, state, request)
    try:
        if body.stream:
            return await stream_response(request, _events(state.client, checked))
        return json_response(await cancel_on_disconnect(request, _complete_response(state.client, checked)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=checked.prepared.constraint_param) from error


@router.post("/v1/messages/count_tokens", **documented(PromptFields, TokenCount, error_body=AnthropicErrorBody))
async def count_tokens(request: Request) -> Response:
    """The number of tokens of the prompt."""
    body = await read_json(request, PromptFields)
    state = state_of(request)
    state.check_model(body.model)
    check_unsupported(body, UNSUPPORTED_FIELDS)
    shows_thinking(body, state.client.tokenizer.chat_template)
    prepared = await prepare_chat(state.client, conversation_of(body))
    return json_response(TokenCount(len(prepared.prompt_ids)))


async def _check(body: MessagesRequest, state: AppState, request: Request) -> CheckedMessage:
    check_unsupported(body, UNSUPPORTED_MESSAGE_FIELDS)
    with_thinking = shows_thinking(body, state.client.tokenizer.chat_template)
    sampling = sampling_of(body)
    prepared = await prepare_chat(state.client, conversation_of(body))
    remaining_context(state.client.model.context_length, prepared.prompt_ids, "messages")
    sampling = with_json_completion(sampling, prepared.constraint)
    submission = Submission(prepared.prompt_ids, sampling, prepared.constraint, tenant=tenant_of(request))
    name = request_id(request)
    usage = AnswerUsage.of(Usage(prompt_tokens=len(prepared.prompt_ids)))
    started = AnthropicMessage(f"msg_{name.removeprefix('req-')}", state.model_name, usage)
    return CheckedMessage(submission, prepared, started, with_thinking, name)


async def _complete_response(client: Client, checked: CheckedMessage) -> AnthropicMessage:
    async with submit(client, [checked.submission]) as handle:
        (result,) = await handle.results()
        output, blocks = ChatOutput(checked.prepared, client, handle.calls[0]), ContentBlocks(checked.with_thinking)
        blocks.add(output.parse_result(result))
        return msgspec.structs.replace(
            checked.started,
            content=blocks.content(),
            usage=AnswerUsage.of(handle.usage()),
            **_stop_reason(checked, output, result),
        )


async def _events(client: Client, checked: CheckedMessage) -> AsyncGenerator[bytes, None]:
    async with submit(client, [checked.submission]) as handle:
        output, blocks = ChatOutput(checked.prepared, client, handle.calls[0]), ContentBlocks(checked.with_thinking)
        has_begun = False
        try:
            async with contextlib.aclosing(handle.progress()) as batches:
                async for batch in batches:
                    events = [] if has_begun else _start_events(checked)
                    has_begun = True
                    for _, update in batch:
                        events += blocks.add(output.parse_update(update))
                    if events:
                        yield _encode_events(events)
            stop, usage = _stop_reason(checked, output, handle.calls[0].result(0)), AnswerUsage.of(handle.usage())
            delta = SseEvent("message_delta", {"type": "message_delta", "delta": stop, "usage": usage})
            yield _encode_events([*blocks.finish(), delta, SseEvent("message_stop", {"type": "message_stop"})])
        except Exception as error:
            if not has_begun:
                raise
            api_error = as_api_error(error, constraint_param=checked.prepared.constraint_param)
            yield named_sse_event("error", anthropic_error(api_error, checked.request_id))


def _stop_reason(checked: CheckedMessage, output: ChatOutput, result: CallResult) -> dict[str, Any]:
    return stop_reason_of(result, checked.submission.sampling.max_tokens, output.finish_reason == "tool_calls")


def _start_events(checked: CheckedMessage) -> list[SseEvent]:
    started = {"type": "message_start", "message": checked.started}
    return [SseEvent("message_start", started), SseEvent("ping", {"type": "ping"})]


def _encode_events(events: Sequence[SseEvent]) -> bytes:
    return b"".join(named_sse_event(event.name, event.data) for event in events)
