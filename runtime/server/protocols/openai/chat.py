"""`/v1/chat/completions`: takes a conversation and returns its next turn, with tool calls and reasoning parsed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.errors import PlaitError
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT, check_sampling
from plait.runtime.server.app_state import AppState, request_id, state_of, tenant_of
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat, prepare_chat
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.sampling_fields import read_sampling_params
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
from plait.runtime.server.protocols.openai.chat_response import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    MessageBuilder,
    ResponseHead,
    delta_of,
)
from plait.runtime.server.protocols.openai.chat_types import UNSUPPORTED_FIELDS, ChatRequest
from plait.runtime.server.protocols.openai.fields import FinishReason, UsageBody
from plait.runtime.server.protocols.shared import check_unsupported, checked_count, remaining_context, token_logprobs

router = APIRouter()

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CheckedChat:
    """A checked request."""

    submission: Submission
    prepared: PreparedChat
    head: ResponseHead
    with_logprobs: bool
    includes_usage: bool


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


async def _check(body: ChatRequest, state: AppState, tenant: str, completion_id: str) -> CheckedChat:
    check_unsupported(body, UNSUPPORTED_FIELDS)
    n = checked_count(body.n, state.settings.max_choices)
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
    prepared = await prepare_chat(state.client, conversation)
    context_left = remaining_context(state.client.model.context_length, prepared.prompt_ids, "messages")
    if max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=context_left)
        check_sampling(sampling)
    sampling = with_json_completion(sampling, prepared.constraint, body.complete)
    salt, priority = body.cache_salt or "", body.priority or 0
    submission = Submission(prepared.prompt_ids, sampling, prepared.constraint, n, tenant, salt, priority)
    head = ResponseHead(completion_id, int(time.time()), state.model_name)
    return CheckedChat(submission, prepared, head, bool(body.logprobs), body.includes_usage)


def _take_logprobs(checked: CheckedChat, client: Client, output: ChatOutput) -> ChoiceLogprobs | None:
    """The logprobs that were not sent yet; None where the request has no `logprobs`."""
    if not checked.with_logprobs:
        return None
    entries, output.logprobs = output.logprobs, []
    return ChoiceLogprobs(token_logprobs(client, entries))


# -- whole answers --------------------------------------------------------------------------------


async def _complete_response(client: Client, checked: CheckedChat) -> ChatCompletion:
    async with submit(client, [checked.submission]) as handle:
        results = await handle.results()
        choices = []
        for index, (call, result) in enumerate(zip(handle.calls, results, strict=True)):
            output, message = ChatOutput(checked.prepared, client, call), MessageBuilder()
            for part in output.parse_result(result):
                message.add(part)
            assert output.finish_reason is not None
            logprobs = _take_logprobs(checked, client, output)
            choices.append(ChatChoice(index, message.build(), logprobs, output.finish_reason))
        return ChatCompletion(*checked.head, choices, UsageBody.of(handle.usage()))


# -- streams --------------------------------------------------------------------------------------


class _ChunkWriter:
    """Writes the chunks of one choice."""

    def __init__(self, checked: CheckedChat, client: Client, call: Call, index: int) -> None:
        self._checked, self._client, self._index = checked, client, index
        self._output = ChatOutput(checked.prepared, client, call)
        self.has_begun = False

    def chunks(self, update: CallUpdate) -> bytes:
        """The events of an update. Logprobs go with its last chunk that has text, otherwise with the very last."""
        deltas = [delta_of(part) for part in self._output.parse_update(update)]
        if not deltas and not update.finished:
            return b""
        if not self.has_begun:
            self.has_begun = True
            deltas.insert(0, Delta(role="assistant", content=""))
        logprobs = _take_logprobs(self._checked, self._client, self._output)
        chunks = [self._chunk(delta, None, None) for delta in deltas[:-1]]
        chunks += [self._chunk(delta, logprobs, None) for delta in deltas[-1:]]
        if update.finished:
            chunks.append(self._chunk(Delta(), None if deltas else logprobs, self._output.finish_reason))
        return b"".join(chunks)

    def _chunk(self, delta: Delta, logprobs: ChoiceLogprobs | None, reason: FinishReason | None) -> bytes:
        choice = ChunkChoice(self._index, delta, logprobs, reason)
        return sse_event(ChatChunk(*self._checked.head, [choice], None if self._checked.includes_usage else UNSET))


async def _events(client: Client, checked: CheckedChat) -> AsyncGenerator[bytes, None]:
    async with submit(client, [checked.submission]) as handle:
        writers = [_ChunkWriter(checked, client, call, index) for index, call in enumerate(handle.calls)]
        try:
            num_open = len(writers)
            async with contextlib.aclosing(handle.progress()) as batches:
                async for batch in batches:
                    chunks = b"".join([writers[index].chunks(update) for index, update in batch])
                    num_open -= sum(update.finished for _, update in batch)
                    if not num_open:
                        yield FinalEvent(chunks + _final_events(handle, checked))
                    elif chunks:
                        yield chunks
        except Exception as error:
            if not any(writer.has_begun for writer in writers):
                raise
            yield sse_event(as_api_error(error, constraint_param=checked.prepared.constraint_param).body())


def _final_events(handle: RequestHandle, checked: CheckedChat) -> bytes:
    if not checked.includes_usage:
        return DONE
    return sse_event(ChatChunk(*checked.head, [], UsageBody.of(handle.usage()))) + DONE
