"""`/v1/messages` and `/v1/messages/count_tokens`: a conversation in, Anthropic's blocks and events out.

Knows: the order of events. Must not know: blocks' insides, templates, formats.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.messages import Usage
from plait.runtime.server.answering import json_answer, named_event, stream_answer, unless_gone
from plait.runtime.server.anthropic.answers import (
    AnswerMessage,
    Blocks,
    Event,
    TokenCount,
    stop_of,
    usage_body,
)
from plait.runtime.server.anthropic.request import conversation_of, sampling_of, shows_thinking
from plait.runtime.server.anthropic.types import REFUSED, REFUSED_WHERE_SAMPLED, MessagesRequest, Prompt
from plait.runtime.server.chatting import Answer, Prepared, prepare
from plait.runtime.server.error_shapes import AnthropicErrorBody, anthropic_error
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.json_body import read_json
from plait.runtime.server.openai.fields import refuse, room_for_answer
from plait.runtime.server.openapi import documented
from plait.runtime.server.running import Work, running
from plait.runtime.server.state import State, request_id, state_of, tenant_of
from plait.runtime.server.whole_values import finishing

router = APIRouter()


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    work: Work
    prepared: Prepared
    head: dict[str, Any]  # of the message, while it is empty
    with_thinking: bool
    request_id: str


@router.post("/v1/messages", **documented(MessagesRequest, AnswerMessage, stream=True, error_body=AnthropicErrorBody))
async def create_message(request: Request) -> Response:
    """The next turn of a conversation. Streams when `stream` is true."""
    body = await read_json(request, MessagesRequest)
    state = state_of(request)
    state.check_model(body.model)
    plan = await _plan(body, state, request)
    try:
        if body.stream:
            return await stream_answer(request, _events(state.client, plan))
        return json_answer(await unless_gone(request, _whole(state.client, plan)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=plan.prepared.constraint_param) from error


@router.post("/v1/messages/count_tokens", **documented(Prompt, TokenCount, error_body=AnthropicErrorBody))
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    body = await read_json(request, Prompt)
    state = state_of(request)
    state.check_model(body.model)
    refuse(body, REFUSED)
    shows_thinking(body, state.client.tokenizer.chat_template)
    prepared = await prepare(state.client, conversation_of(body))
    return json_answer(TokenCount(len(prepared.prompt_ids)))


async def _plan(body: MessagesRequest, state: State, request: Request) -> Plan:
    refuse(body, REFUSED_WHERE_SAMPLED)
    with_thinking = shows_thinking(body, state.client.tokenizer.chat_template)
    sampling = sampling_of(body)
    prepared = await prepare(state.client, conversation_of(body))
    room_for_answer(state.client.model.context_length, prepared.prompt_ids, "messages")
    sampling = finishing(sampling, prepared.constraint)
    work = Work(prepared.prompt_ids, sampling, prepared.constraint, tenant=tenant_of(request))
    name = request_id(request)
    head: dict[str, Any] = {
        "id": f"msg_{name.removeprefix('req-')}",
        "type": "message",
        "role": "assistant",
        "model": state.model_name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(Usage(prompt_tokens=len(prepared.prompt_ids))),
    }
    return Plan(work, prepared, head, with_thinking, name)


async def _whole(client: Client, plan: Plan) -> dict[str, Any]:
    async with running(client, [plan.work]) as run:
        (result,) = await run.results()
        answer, blocks = Answer(plan.prepared, client, run.calls[0]), Blocks(plan.with_thinking)
        blocks.add(answer.read_whole(result))
        stop = stop_of(result, plan.work.sampling.max_tokens, answer.finish_reason == "tool_calls")
        return {**plan.head, "content": blocks.content(), **stop, "usage": usage_body(run.usage())}


async def _events(client: Client, plan: Plan) -> AsyncGenerator[bytes, None]:
    async with running(client, [plan.work]) as run:
        answer, blocks = Answer(plan.prepared, client, run.calls[0]), Blocks(plan.with_thinking)
        has_begun = False
        try:
            async with contextlib.aclosing(run.progress()) as batches:
                async for batch in batches:
                    events = [] if has_begun else _beginning(plan)
                    has_begun = True
                    for _, news in batch:
                        events += blocks.add(answer.read(news))
                    if events:
                        yield _written(events)
            stop = stop_of(run.calls[0].result(0), plan.work.sampling.max_tokens, answer.finish_reason == "tool_calls")
            usage = usage_body(run.usage())
            ending = Event("message_delta", {"type": "message_delta", "delta": stop, "usage": usage})
            yield _written([*blocks.finish(), ending, Event("message_stop", {"type": "message_stop"})])
        except Exception as error:
            if not has_begun:
                raise
            answer_error = as_api_error(error, constraint_param=plan.prepared.constraint_param)
            yield named_event("error", anthropic_error(answer_error, plan.request_id))


def _beginning(plan: Plan) -> list[Event]:
    started = {"type": "message_start", "message": plan.head}
    return [Event("message_start", started), Event("ping", {"type": "ping"})]


def _written(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event.name, event.data) for event in events)
