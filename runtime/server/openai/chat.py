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
from plait.runtime.client.following import Progress
from plait.runtime.errors import PlaitError
from plait.runtime.sampling import check_sampling
from plait.runtime.server.answering import Last, json_answer, sse, stream_answer, unless_gone
from plait.runtime.server.chatting import Answer, Prepared, prepare
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.json_body import read_json
from plait.runtime.server.openai.chat_answers import ChatCompletion, token_logprobs
from plait.runtime.server.openai.chat_request import conversation_of, max_tokens_of, top_logprobs_of
from plait.runtime.server.openai.chat_types import REFUSED, ChatRequest
from plait.runtime.server.openai.fields import count_of, refuse, room_for_answer, sampling_of, usage_body
from plait.runtime.server.openapi import documented
from plait.runtime.server.reading import Part
from plait.runtime.server.running import Run, Work, running
from plait.runtime.server.state import State, request_id, state_of, tenant_of
from plait.runtime.server.whole_values import finishing

router = APIRouter()

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    work: Work
    prepared: Prepared
    head: dict[str, Any]  # of every answer or chunk
    with_logprobs: bool
    include_usage: bool


@router.post("/v1/chat/completions", **documented(ChatRequest, ChatCompletion, stream=True))
async def create_chat_completion(request: Request) -> Response:
    """The next turn of a conversation. Streams when `stream` is true."""
    body = await read_json(request, ChatRequest)
    state = state_of(request)
    state.check_model(body.model)
    plan = await _plan(body, state, tenant_of(request), "chatcmpl-" + request_id(request)[4:])
    try:
        if body.stream:
            return await stream_answer(request, _events(state.client, plan))
        return json_answer(await unless_gone(request, _whole(state.client, plan)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=plan.prepared.constraint_param) from error


async def _plan(body: ChatRequest, state: State, tenant: str, answer_id: str) -> Plan:
    refuse(body, REFUSED)
    n = count_of(body.n, state.settings.max_choices)
    asked = conversation_of(body)
    top_logprobs = top_logprobs_of(body)
    most = max_tokens_of(body)
    sampling = sampling_of(  # refuses wrong values before any work
        body, max_tokens=1 << 20 if most is None else most, logprobs=bool(body.logprobs), top_logprobs=top_logprobs
    )
    prepared = await prepare(state.client, asked)
    room = room_for_answer(state.client.model.context_length, prepared.prompt_ids, "messages")
    if most is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=room)
        check_sampling(sampling)
    sampling = finishing(sampling, prepared.constraint, body.complete)
    salt, priority = body.cache_salt or "", body.priority or 0
    work = Work(prepared.prompt_ids, sampling, prepared.constraint, n, tenant, salt, priority)
    head = {"id": answer_id, "created": int(time.time()), "model": state.model_name, "system_fingerprint": None}
    options = body.stream_options
    return Plan(work, prepared, head, bool(body.logprobs), bool(options and options.include_usage))


def _take_logprobs(plan: Plan, client: Client, answer: Answer) -> dict[str, Any] | None:
    """What was not told yet, in OpenAI's shape; None when logprobs were not asked for."""
    if not plan.with_logprobs:
        return None
    taken, answer.logprobs = answer.logprobs, []
    return {"content": token_logprobs(client, taken), "refusal": None}


# -- whole answers --------------------------------------------------------------------------------


@dataclass
class _Message:
    """A whole message, the sum of its parts."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {"text": [], "reasoning": []})
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: Part) -> None:
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


async def _whole(client: Client, plan: Plan) -> dict[str, Any]:
    async with running(client, [plan.work]) as run:
        results = await run.results()
        choices = []
        for index, (call, result) in enumerate(zip(run.calls, results, strict=True)):
            answer, message = Answer(plan.prepared, client, call), _Message()
            for part in answer.read_whole(result):
                message.add(part)
            logprobs = _take_logprobs(plan, client, answer)
            told = {"message": message.body(), "logprobs": logprobs, "finish_reason": answer.finish_reason}
            choices.append({"index": index, **told})
        return {**plan.head, "object": "chat.completion", "choices": choices, "usage": usage_body(run.usage())}


# -- streams --------------------------------------------------------------------------------------


class _Stream:
    """The chunks of one answer."""

    def __init__(self, plan: Plan, client: Client, call: Call, index: int) -> None:
        self._plan, self._client, self._index = plan, client, index
        self._answer = Answer(plan.prepared, client, call)
        self._head = {**plan.head, "object": "chat.completion.chunk"} | ({"usage": None} if plan.include_usage else {})
        self.has_begun = False

    def chunks(self, news: Progress) -> bytes:
        """What is new; the logprobs so far go with the last chunk that has text, else with the very last."""
        deltas = [_delta(part) for part in self._answer.read(news)]
        if not deltas and not news.ended:
            return b""
        if not self.has_begun:
            self.has_begun = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        logprobs = _take_logprobs(self._plan, self._client, self._answer)
        chunks = [self._chunk(delta, None, None) for delta in deltas[:-1]]
        chunks += [self._chunk(delta, logprobs, None) for delta in deltas[-1:]]
        if news.ended:
            chunks.append(self._chunk({}, None if deltas else logprobs, self._answer.finish_reason))
        return b"".join(chunks)

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse({**self._head, "choices": [choice]})


async def _events(client: Client, plan: Plan) -> AsyncGenerator[bytes, None]:
    async with running(client, [plan.work]) as run:
        streams = [_Stream(plan, client, call, index) for index, call in enumerate(run.calls)]
        try:
            num_open = len(streams)
            async with contextlib.aclosing(run.progress()) as batches:
                async for batch in batches:
                    chunks = b"".join([streams[index].chunks(news) for index, news in batch])
                    num_open -= sum(news.ended for _, news in batch)
                    if not num_open:
                        yield Last(chunks + _end(run, plan))
                    elif chunks:
                        yield chunks
        except Exception as error:
            if not any(stream.has_begun for stream in streams):
                raise
            yield sse(as_api_error(error, constraint_param=plan.prepared.constraint_param).body())


def _end(run: Run, plan: Plan) -> bytes:
    if not plan.include_usage:
        return DONE
    head = {**plan.head, "object": "chat.completion.chunk"}
    return sse({**head, "choices": [], "usage": usage_body(run.usage())}) + DONE


def _delta(part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.kind == "call":
        return {"tool_calls": [{"index": part.number, **_call(part.text, "")}]}
    return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}
