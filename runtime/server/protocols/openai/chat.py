"""`/v1/chat/completions`: takes a conversation and returns its next turn, with tool calls and reasoning parsed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT, check_sampling
from plait.runtime.server.app_state import request_id, tenant_of, use_model_in_turn
from plait.runtime.server.chat.engine import ChatOutput, PreparedChat, prepare_chat
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.generation.cache_miss import CacheMissReport, cache_miss_report
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.sampling_fields import read_sampling_params
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import sse_event
from plait.runtime.server.protocols.answer import DONE, AnswerWriter, Batch, answer
from plait.runtime.server.protocols.openai.chat_request import (
    ChatRequest,
    CustomTool,
    conversation_of,
    max_tokens_of,
    top_logprobs_of,
)
from plait.runtime.server.protocols.openai.chat_response import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    DeltaBuilder,
    MessageBuilder,
    ResponseHead,
)
from plait.runtime.server.protocols.openai.fields import FinishReason, UsageBody
from plait.runtime.server.protocols.shared import (
    ImportanceWeight,
    checked_count,
    importance_weight,
    remaining_context,
    timeout_of,
    token_logprobs,
)

router = APIRouter()


@dataclass(frozen=True)
class CheckedChat:
    """A checked request. `custom_tools`: names of tools with freeform input."""

    submission: Submission
    prepared: PreparedChat
    head: ResponseHead
    with_logprobs: bool
    includes_usage: bool
    custom_tools: frozenset[str]


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
        lambda handle: _ChatWriter(checked, model.client, handle),
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


class _ChoiceWriter:
    """Makes one choice, or writes its chunks."""

    def __init__(self, checked: CheckedChat, client: Client, handle: RequestHandle, index: int) -> None:
        self._checked, self._client, self._handle, self._index = checked, client, handle, index
        self._output = ChatOutput(checked.prepared, client, handle.calls[index])
        self._deltas = DeltaBuilder(checked.custom_tools)
        self._has_begun = False

    def choice(self, result: CallResult) -> ChatChoice:
        """The choice of a call that has ended."""
        message = MessageBuilder(self._checked.custom_tools)
        for part in self._output.parse_result(result):
            message.add(part)
        reason, logprobs = self._output.finish_reason, self._take_logprobs()
        assert reason is not None
        return ChatChoice(self._index, message.build(), logprobs, reason, *self._extensions(result))

    def chunks(self, update: CallUpdate) -> bytes:
        """The events of an update. Logprobs go with its last chunk that has text, otherwise with the very last."""
        deltas = [delta for part in self._output.parse_update(update) for delta in self._deltas.deltas(part)]
        if not deltas and not update.finished:
            return b""
        if not self._has_begun:
            self._has_begun = True
            deltas.insert(0, Delta(role="assistant", content=""))
        logprobs = self._take_logprobs()
        chunks = [self._chunk(delta, None, None) for delta in deltas[:-1]]
        chunks += [self._chunk(delta, logprobs, None) for delta in deltas[-1:]]
        if update.finished:
            result = self._output.call.result(0)
            chunks.append(self._chunk(Delta(), None if deltas else logprobs, self._output.finish_reason, result))
        return b"".join(chunks)

    def _chunk(
        self,
        delta: Delta,
        logprobs: ChoiceLogprobs | None,
        reason: FinishReason | None,
        result: CallResult | None = None,
    ) -> bytes:
        """An event; `result`: of the choice that it ends."""
        extensions = () if result is None else self._extensions(result)
        more = self._checked.prepared.warnings
        warnings = UNSET if result is None else self._handle.warnings([self._output.call], more)
        choice = ChunkChoice(self._index, delta, logprobs, reason, *extensions)
        usage = None if self._checked.includes_usage else UNSET
        return sse_event(ChatChunk(*self._checked.head, [choice], usage, warnings=warnings))

    def _take_logprobs(self) -> ChoiceLogprobs | None:
        """The logprobs that were not sent yet; None where the request has no `logprobs`."""
        if not self._checked.with_logprobs:
            return None
        entries, self._output.logprobs = self._output.logprobs, []
        return ChoiceLogprobs(token_logprobs(self._client, entries))

    def _extensions(self, result: CallResult) -> tuple[ImportanceWeight | UnsetType, CacheMissReport | UnsetType]:
        """The last fields of a choice that has ended."""
        miss = cache_miss_report(self._client, result, self._checked.submission.prompt_ids)
        return importance_weight(result), miss


class _ChatWriter(AnswerWriter):
    """All choices, and the usage: in a stream at the end, if it is requested."""

    def __init__(self, checked: CheckedChat, client: Client, handle: RequestHandle) -> None:
        self._checked, self._handle = checked, handle
        self._writers = [_ChoiceWriter(checked, client, handle, index) for index in range(len(handle.calls))]

    def body(self, results: Sequence[CallResult]) -> ChatCompletion:
        choices = [writer.choice(result) for writer, result in zip(self._writers, results, strict=True)]
        usage, warnings = (
            UsageBody.of(self._handle.usage()),
            self._handle.warnings(more=self._checked.prepared.warnings),
        )
        return ChatCompletion(*self._checked.head, choices, usage, warnings=warnings)

    def write(self, batch: Batch) -> bytes:
        return b"".join([self._writers[index].chunks(update) for index, update in batch])

    def finish(self) -> bytes:
        if not self._checked.includes_usage:
            return DONE
        return sse_event(ChatChunk(*self._checked.head, [], UsageBody.of(self._handle.usage()))) + DONE
