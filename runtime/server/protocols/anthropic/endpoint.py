"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API for the next turn of a conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.call_reports import Usage
from plait.runtime.server.app_state import request_id, tenant_of, use_model, use_model_in_turn
from plait.runtime.server.chat.engine import prepare_chat
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.submission import Submission
from plait.runtime.server.http.error_bodies import AnthropicErrorBody
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.answer import answer
from plait.runtime.server.protocols.anthropic.request import (
    MessagesRequest,
    PromptFields,
    conversation_of,
    sampling_of,
)
from plait.runtime.server.protocols.anthropic.response import (
    PING,
    AnswerUsage,
    AnthropicMessage,
    CheckedMessage,
    MessageWriter,
    TokenCount,
    error_event,
)
from plait.runtime.server.protocols.shared import remaining_context

router = APIRouter()


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
        lambda handle: MessageWriter(model.client, checked, handle),
        stream=bool(body.stream),
        constraint_param=checked.prepared.constraint_param,
        fail=lambda error: error_event(error, checked),
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
