"""`/v1/chat/completions`: a conversation in, its next turn out, with tool calls and reasoning apart.

Knows: OpenAI's chat objects. Must not know: templates, formats, sockets.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.errors import PlaitError
from plait.runtime.sampling_params import check_sampling
from plait.runtime.server.app_state import AppState, request_id, state_of, tenant_of
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat, prepare_chat
from plait.runtime.server.chat.parser import ParsedPart
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.submission import RequestHandle, Submission, submit
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import (
    FinalEvent,
    cancel_on_disconnect,
    json_response,
    sse_event,
    stream_response,
)
from plait.runtime.server.protocols.openai.chat_request import conversation_of, max_tokens_of, top_logprobs_of
from plait.runtime.server.protocols.openai.chat_response import ChatCompletion, token_logprobs
from plait.runtime.server.protocols.openai.chat_types import UNSUPPORTED_FIELDS, ChatRequest
from plait.runtime.server.protocols.openai.fields import (
    check_unsupported,
    checked_count,
    remaining_context,
    sampling_of,
    usage_body,
)

router = APIRouter()

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CheckedChat:
    """A checked request."""

    submission: Submission
    prepared: PreparedChat
    envelope: dict[str, Any]  # of every answer or chunk
    with_logprobs: bool
    include_usage: bool


@router.post("/v1/chat/completions", **documented(ChatRequest, ChatCompletion, stream=True))
async def create_chat_completion(request: Request) -> Response:
    """The next turn of a conversation. Streams when `stream` is true."""
    body = await read_json(request, ChatRequest)
    state = state_of(request)
    state.check_model(body.model)
    checked = await _check(body, state, tenant_of(request), "chatcmpl-" + request_id(request)[4:])
    try:
        if body.stream:
            return await stream_response(request, _events(state.client, checked))
        return json_response(await cancel_on_disconnect(request, _complete_response(state.client, checked)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=checked.prepared.constraint_param) from error


async def _check(body: ChatRequest, state: AppState, tenant: str, answer_id: str) -> CheckedChat:
    check_unsupported(body, UNSUPPORTED_FIELDS)
    n = checked_count(body.n, state.settings.max_choices)
    conversation = conversation_of(body)
    top_logprobs = top_logprobs_of(body)
    max_tokens = max_tokens_of(body)
    sampling = sampling_of(  # refuses wrong values before any work
        body,
        max_tokens=1 << 20 if max_tokens is None else max_tokens,
        logprobs=bool(body.logprobs),
        top_logprobs=top_logprobs,
    )
    prepared = await prepare_chat(state.client, conversation)
    context_left = remaining_context(state.client.model.context_length, prepared.prompt_ids, "messages")
    if max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=context_left)
        check_sampling(sampling)
    sampling = with_json_completion(sampling, prepared.constraint, body.complete)
    salt, priority = body.cache_salt or "", body.priority or 0
    submission = Submission(prepared.prompt_ids, sampling, prepared.constraint, n, tenant, salt, priority)
    envelope = {"id": answer_id, "created": int(time.time()), "model": state.model_name, "system_fingerprint": None}
    options = body.stream_options
    return CheckedChat(submission, prepared, envelope, bool(body.logprobs), bool(options and options.include_usage))


def _pending_logprobs(checked: CheckedChat, client: Client, answer: ChatOutput) -> dict[str, Any] | None:
    """What was not told yet, in OpenAI's shape; None when logprobs were not asked for."""
    if not checked.with_logprobs:
        return None
    taken, answer.logprobs = answer.logprobs, []
    return {"content": token_logprobs(client, taken), "refusal": None}


# -- whole answers --------------------------------------------------------------------------------


@dataclass
class _MessageBuilder:
    """A whole message, the sum of its parts."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {"text": [], "reasoning": []})
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: ParsedPart) -> None:
        if part.kind == "call":
            self.calls.append(_call(part.text, ""))
        elif part.kind == "arguments":
            self.calls[part.number]["function"]["arguments"] += part.text
        else:
            self.texts[part.kind].append(part.text)

    def body(self) -> dict[str, Any]:
        text, reasoning = "".join(self.texts["text"]), "".join(self.texts["reasoning"])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if self.calls else ""),
            "refusal": None,
        }
        if self.calls:
            message["tool_calls"] = self.calls
        if reasoning:
            message["reasoning_content"] = reasoning
        return message


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


async def _complete_response(client: Client, checked: CheckedChat) -> dict[str, Any]:
    async with submit(client, [checked.submission]) as handle:
        results = await handle.results()
        choices = []
        for index, (call, result) in enumerate(zip(handle.calls, results, strict=True)):
            answer, message = ChatOutput(checked.prepared, client, call), _MessageBuilder()
            for part in answer.parse_result(result):
                message.add(part)
            logprobs = _pending_logprobs(checked, client, answer)
            told = {"message": message.body(), "logprobs": logprobs, "finish_reason": answer.finish_reason}
            choices.append({"index": index, **told})
        return {
            **checked.envelope,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_body(handle.usage()),
        }


# -- streams --------------------------------------------------------------------------------------


class _ChunkWriter:
    """The chunks of one answer."""

    def __init__(self, checked: CheckedChat, client: Client, call: Call, index: int) -> None:
        self._check, self._client, self._index = checked, client, index
        self._answer = ChatOutput(checked.prepared, client, call)
        self._envelope = {**checked.envelope, "object": "chat.completion.chunk"} | (
            {"usage": None} if checked.include_usage else {}
        )
        self.has_begun = False

    def chunks(self, update: CallUpdate) -> bytes:
        """What is new; the logprobs so far go with the last chunk that has text, else with the very last."""
        deltas = [_delta(part) for part in self._answer.parse_update(update)]
        if not deltas and not update.finished:
            return b""
        if not self.has_begun:
            self.has_begun = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        logprobs = _pending_logprobs(self._check, self._client, self._answer)
        chunks = [self._chunk(delta, None, None) for delta in deltas[:-1]]
        chunks += [self._chunk(delta, logprobs, None) for delta in deltas[-1:]]
        if update.finished:
            chunks.append(self._chunk({}, None if deltas else logprobs, self._answer.finish_reason))
        return b"".join(chunks)

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse_event({**self._envelope, "choices": [choice]})


async def _events(client: Client, checked: CheckedChat) -> AsyncGenerator[bytes, None]:
    async with submit(client, [checked.submission]) as handle:
        streams = [_ChunkWriter(checked, client, call, index) for index, call in enumerate(handle.calls)]
        try:
            num_open = len(streams)
            async with contextlib.aclosing(handle.progress()) as batches:
                async for batch in batches:
                    chunks = b"".join([streams[index].chunks(update) for index, update in batch])
                    num_open -= sum(update.finished for _, update in batch)
                    if not num_open:
                        yield FinalEvent(chunks + _final_events(handle, checked))
                    elif chunks:
                        yield chunks
        except Exception as error:
            if not any(stream.has_begun for stream in streams):
                raise
            yield sse_event(as_api_error(error, constraint_param=checked.prepared.constraint_param).body())


def _final_events(handle: RequestHandle, checked: CheckedChat) -> bytes:
    if not checked.include_usage:
        return DONE
    envelope = {**checked.envelope, "object": "chat.completion.chunk"}
    return sse_event({**envelope, "choices": [], "usage": usage_body(handle.usage())}) + DONE


def _delta(part: ParsedPart) -> dict[str, Any]:
    if part.kind == "text":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.kind == "call":
        return {"tool_calls": [{"index": part.number, **_call(part.text, "")}]}
    return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}
