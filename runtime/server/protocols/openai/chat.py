"""`/v1/chat/completions`: takes a conversation and returns its next turn, with tool calls and reasoning parsed."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.sampling_params import MAX_TOKENS_LIMIT, check_sampling
from plait.runtime.server.app_state import request_id, tenant_of, use_model_in_turn
from plait.runtime.server.chat.engine import prepare_chat
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.sampling_fields import read_sampling_params
from plait.runtime.server.generation.submission import Submission
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.protocols.answer import answer
from plait.runtime.server.protocols.openai.chat_request import (
    ChatRequest,
    CustomTool,
    conversation_of,
    max_tokens_of,
    top_logprobs_of,
)
from plait.runtime.server.protocols.openai.chat_response import ChatCompletion, ChatWriter, CheckedChat
from plait.runtime.server.protocols.openai.fields import ResponseHead
from plait.runtime.server.protocols.shared import checked_count, remaining_context, timeout_of

router = APIRouter()


@router.post("/v1/chat/completions", **documented(ChatRequest, ChatCompletion, stream=True))
async def create_chat_completion(request: Request) -> Response:
    """The next turn of a conversation. Streams when `stream` is true."""
    body = await read_json(request, ChatRequest)
    model = await use_model_in_turn(request, body.model, timeout_of(body))
    checked = await _check(body, model, tenant_of(request), "chatcmpl-" + request_id(request)[4:])
    return await answer(
        request,
        model,
        [checked.submission],
        lambda handle: ChatWriter(checked, model.client, handle),
        stream=bool(body.stream),
        constraint_param=checked.prepared.constraint_param,
    )


async def _check(body: ChatRequest, model: ServedModel, tenant: str, completion_id: str) -> CheckedChat:
    n = checked_count(body.n, model.settings.max_choices)
    conversation = conversation_of(body)
    top_logprobs = top_logprobs_of(body)
    max_tokens = max_tokens_of(body)
    sampling = read_sampling_params(  # before the prompt is rendered, so that a wrong value costs no work
        body,
        "openai",
        max_tokens=MAX_TOKENS_LIMIT if max_tokens is None else max_tokens,
        logprobs=bool(body.logprobs),
        top_logprobs=top_logprobs,
    )
    untagged = model.settings.untagged_tool_calls
    prepared = await prepare_chat(model.client, conversation, untagged_tool_calls=untagged)
    context_left = remaining_context(model.client.model.context_length, prepared.prompt_ids, "messages")
    if max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=context_left)
        check_sampling(sampling)
    sampling = with_json_completion(sampling, prepared.constraint, body.complete)
    salt, priority = body.cache_salt or "", body.priority or 0
    submission = Submission(
        prepared.prompt_ids, sampling, prepared.constraint, n, tenant, salt, priority, plain_bytes=prepared.plain_bytes
    )
    head = ResponseHead(completion_id, int(time.time()), body.model)
    custom_tools = frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool))
    return CheckedChat(submission, prepared, head, bool(body.logprobs), body.includes_usage, custom_tools)
