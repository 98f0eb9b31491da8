"""`/generate`, `/abort_request` and `/concate_and_append_request`, for SGLang's clients and language."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Annotated, Self

from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate, stream_updates
from plait.runtime.errors import Aborted
from plait.runtime.server.app_state import request_id, tenant_of, use_model
from plait.runtime.server.errors import ApiError, invalid
from plait.runtime.server.generation.logprobs import MIN_LOGPROB, LogprobAligner, token_text
from plait.runtime.server.generation.submission import RequestHandle
from plait.runtime.server.generation.threads import LARGE_TOKENS, run_in_thread_if
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import encoded, json_response, sse_event
from plait.runtime.server.in_flight import current_request
from plait.runtime.server.protocols.answer import DONE, AnswerWriter, Batch, answer
from plait.runtime.server.protocols.sglang.request import PromptRequest, is_single, parse_generate_request
from plait.runtime.server.protocols.sglang.types import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    MetaInfo,
    TokenEntry,
)
from plait.runtime.server.protocols.shared import StrictStruct, extensions
from plait.runtime.tokenizer.detokenizer import Detokenizer

router = APIRouter()
MAX_JOINED_STATES = 1024


class JoinRequest(StrictStruct):
    """The request ids of the joined states, and of the state that has their texts."""

    src_rids: Annotated[list[str], Meta(max_length=MAX_JOINED_STATES)]
    dst_rid: str


class AbortRequest(StrictStruct):
    """`rid`: the one sent to `/generate`. `abort_all`: all requests with this client's API key."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: None = None


@router.post("/generate", **documented(GenerateRequest, GenerateResponse | list[GenerateResponse], stream=True))
async def generate(request: Request) -> Response:
    """Continues texts. One prompt with n=1 gives an object, all else a list. Streams when `stream` is true."""
    body = await read_json(request, GenerateRequest)
    model, tenant = await use_model(request, body.model, body.timeout), tenant_of(request)
    prompt_requests = await parse_generate_request(body, model.client, tenant, request_id(request), model.settings)
    registry = _registry(request)
    aborted = _register_wait(registry, tenant, prompt_requests)
    is_list = not is_single(body) or prompt_requests[0].submission.n > 1
    return await answer(
        request,
        model,
        [prompt_request.submission for prompt_request in prompt_requests],
        lambda handle: _GenerateWriter(model.client, prompt_requests, handle, is_list, registry, aborted),
        stream=bool(body.stream),
        constraint_param=prompt_requests[0].constraint_param,
    )


def _register_wait(registry: AbortRegistry, tenant: str, prompt_requests: Sequence[PromptRequest]) -> set[str]:
    """Lets clients abort the request while it waits for its turn. Returns the rids that they abort.

    The wait ends when all of them are aborted; the calls of some are aborted when they begin.
    """
    record, rids, aborted = current_request(), {prompt_request.rid for prompt_request in prompt_requests}, set[str]()
    place = record.place if record is not None else None
    if record is None or place is None:
        return aborted
    registrations = contextlib.ExitStack()

    def abort(rid: str) -> bool:
        if place.waiter is None or place.waiter.done():
            return False
        aborted.add(rid)
        if aborted == rids:
            place.end_wait("the request was aborted", "aborted")
        return True

    for rid in rids:
        registrations.enter_context(registry.registered(tenant, rid, partial(abort, rid)))
    record.on_end.append(registrations.close)
    return aborted


@router.post("/abort_request", **documented(AbortRequest, errors=(400, 413, 415, 500, 503)))
async def abort_request(request: Request) -> Response:
    """Aborts running requests. Their answers have the text so far and finish_reason "abort"."""
    body = await read_json(request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise invalid("give 'rid', or set 'abort_all' to true", "rid", "missing_required_parameter")
    count = _registry(request).abort(tenant_of(request), None if body.abort_all else body.rid)
    return json_response({"aborted": count})


@router.post("/concate_and_append_request", **documented(JoinRequest, errors=(400, 413, 415, 500, 503)))
async def concate_and_append_request(request: Request) -> Response:
    """Sent by SGLang's language at `join("concate_and_append")`, after it joined the texts itself. Has no effect: the
    next call sends the joined text, which is computed exactly from where the cache ends."""
    await read_json(request, JoinRequest)
    return json_response({})


def _registry(request: Request) -> AbortRegistry:
    app = request.app.state
    if not hasattr(app, "sglang_registry"):
        app.sglang_registry = AbortRegistry()
    registry: AbortRegistry = app.sglang_registry
    return registry


class _GenerateWriter(AnswerWriter):
    """All answers. Their calls can be aborted by their rid while they are written; those of `aborted` are at once."""

    raises_failures = False  # an aborted call has an answer

    def __init__(
        self,
        client: Client,
        prompt_requests: Sequence[PromptRequest],
        handle: RequestHandle,
        is_list: bool,
        registry: AbortRegistry,
        aborted: Collection[str],
    ) -> None:
        self._owners = [owner for owner in prompt_requests for _ in range(owner.submission.n)]
        self._calls, self._is_list, self._registry, self._aborted = handle.calls, is_list, registry, aborted
        self._writers = [
            SglangResponseWriter(client, owner, handle, call, index if is_list else None)
            for index, (owner, call) in enumerate(zip(self._owners, handle.calls, strict=True))
        ]
        self._registrations = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for rid, tenant in {(owner.rid, owner.submission.tenant) for owner in self._owners}:
            self._registrations.enter_context(self._registry.registered(tenant, rid, partial(self._abort, rid)))
        for rid in self._aborted:
            self._abort(rid)
        return self

    def __exit__(self, *error: object) -> None:
        self._registrations.close()

    def _abort(self, rid: str) -> bool:
        for owner, writer, call in zip(self._owners, self._writers, self._calls, strict=True):
            if owner.rid == rid and not call.done():
                writer.aborted = True
                call.abort()
        return True

    async def complete(self, handle: RequestHandle) -> GenerateResponse | list[GenerateResponse]:
        async with contextlib.aclosing(stream_updates(handle.calls, only_final=True)) as batches:
            async for batch in batches:
                is_large = sum(len(update.token_ids) for _, update in batch) > LARGE_TOKENS
                await run_in_thread_if(is_large, self._push, batch)
        responses = [await run_in_thread_if(writer.is_large, writer.response) for writer in self._writers]
        for response in responses:
            response.index = UNSET
        return responses if self._is_list else responses[0]

    async def write_before(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        if changed := self._push(batch):
            yield await run_in_thread_if(any(writer.is_large for writer in changed), _chunks, changed)

    def _push(self, batch: Batch) -> list[SglangResponseWriter]:
        """Adds updates. Returns the writers whose responses changed."""
        return [self._writers[index] for index, update in batch if self._writers[index].push(update)]

    def fail(self, error: ApiError) -> bytes:
        return super().fail(error) + DONE


def _chunks(writers: Sequence[SglangResponseWriter]) -> bytes:
    return b"".join(sse_event(writer.response()) for writer in writers)


# -- response -------------------------------------------------------------------------------------
# Writes answers in SGLang's format.
#
# Each chunk of a stream has the whole text so far, as SGLang's own do: the last one is the whole answer.


class SglangResponseWriter:
    """Collects one call's answer: `push` takes updates, `response()` is the answer so far."""

    def __init__(
        self, client: Client, prompt_request: PromptRequest, handle: RequestHandle, call: Call, index: int | None
    ) -> None:
        self._client, self._prompt_request, self._handle, self._call = client, prompt_request, handle, call
        self._warnings: list[str] | UnsetType = UNSET
        self._index = UNSET if index is None else index
        vocabulary = client.tokenizer.vocabulary
        self._logprob_aligner = LogprobAligner(vocabulary.token_bytes) if prompt_request.with_logprobs else None
        self._names = None if prompt_request.skip_special_tokens else Detokenizer(_with_control_texts(client))
        self._text: list[str] = []
        self._ids: list[int] = []
        self._entries: list[TokenEntry] = []  # of the answer, encoded once: every chunk of a stream has all of them
        self._top_entries: list[list[TokenEntry] | None] = []
        self._result: CallResult | None = None
        self.aborted = False

    def push(self, update: CallUpdate) -> bool:
        """Adds an update; returns whether the response changed. Raises the call's error, unless it was aborted by
        request."""
        text = update.text if self._names is None else self._names.push(update.token_ids)
        self._text.append(text)
        self._ids += update.token_ids
        if self._logprob_aligner is not None:
            logprobs = self._logprob_aligner.push(update)
            self._entries += [self._entry(logprob) for logprob in logprobs]
            if self._prompt_request.top_logprobs:
                self._top_entries += [self._top_of(logprob) for logprob in logprobs]
        if update.finished:
            try:
                self._result = self._call.result(0)
            except Aborted:
                if not self.aborted:
                    raise
            self._warnings = self._handle.warnings([] if self._result is None else [self._call])
        return bool(text) or update.finished

    @property
    def is_large(self) -> bool:
        """Whether making the response takes more than a few milliseconds."""
        num_prompt = 0 if self._prompt_request.input_start is None else len(self._prompt_request.submission.prompt_ids)
        return self._prompt_request.with_logprobs and num_prompt + len(self._ids) > LARGE_TOKENS

    def response(self) -> GenerateResponse:
        return GenerateResponse("".join(self._text), self._ids, self._meta_info(), self._index)

    def _meta_info(self) -> MetaInfo:
        result = self._result
        meta_info = MetaInfo(
            self._prompt_request.rid,
            self._finish_reason(),
            prompt_tokens=len(self._prompt_request.submission.prompt_ids),
            completion_tokens=len(self._ids) if result is None else result.usage.completion_tokens,
            cached_tokens=None if result is None else result.usage.cached_tokens,
            e2e_latency=UNSET if result is None else result.usage.wall_s,
            warnings=self._warnings,
            particles=UNSET if result is None or result.particles is None else result.particles.report(),
        )
        if result is not None:
            prompt_ids = self._prompt_request.submission.prompt_ids
            meta_info.weight, meta_info.cache_miss = extensions(self._client, result, prompt_ids)
        if self._prompt_request.with_logprobs:
            meta_info.output_token_logprobs = self._entries
            if self._prompt_request.top_logprobs:
                meta_info.output_top_logprobs = self._top_entries
            if result is not None:
                self._add_input_logprobs(meta_info, result.prompt_logprobs or [])
        return meta_info

    def _finish_reason(self) -> FinishReason | None:
        if self.aborted:
            return FinishReason("abort", message="the request was aborted")
        if self._result is None:
            return None
        if self._result.finish_reason == "length":
            return FinishReason("length", length=self._result.usage.completion_tokens)
        return FinishReason("stop", matched=self._result.matched)

    def _add_input_logprobs(self, meta_info: MetaInfo, logprobs: Sequence[TokenLogprob]) -> None:
        first: list[TokenEntry] = []
        if self._prompt_request.input_start == 0:  # the first token of a text has no logprob
            token = self._prompt_request.submission.prompt_ids[0]
            first = [(None, token, self._token_text(token))]
        meta_info.input_token_logprobs = first + [self._entry(logprob) for logprob in logprobs]
        if self._prompt_request.top_logprobs:
            no_top: list[list[TokenEntry] | None] = [None] * len(first)
            meta_info.input_top_logprobs = no_top + [self._top_of(logprob) for logprob in logprobs]

    def _entry(self, logprob: TokenLogprob) -> TokenEntry:
        return encoded((max(logprob.logprob, MIN_LOGPROB), logprob.token_id, self._token_text(logprob.token_id)))

    def _top_of(self, logprob: TokenLogprob) -> list[TokenEntry]:
        return encoded([(max(value, MIN_LOGPROB), token, self._token_text(token)) for token, value in logprob.top])

    def _token_text(self, token: int) -> str | None:
        if not self._prompt_request.with_text:
            return None
        return token_text(self._client, token)


def _with_control_texts(client: Client) -> Vocabulary:
    """The vocabulary, with the names of control tokens as their bytes."""
    vocabulary, names = client.tokenizer.vocabulary, client.tokenizer.control_texts
    token_bytes = tuple(
        names[token].encode() if token in names else data for token, data in enumerate(vocabulary.token_bytes)
    )
    return Vocabulary(token_bytes, vocabulary.eos_ids, vocabulary.encode)


# -- abort registry -------------------------------------------------------------------------------
# Running calls by request id, so that a client can abort them. Tenants cannot abort each other's requests.

Key = tuple[str, str]  # tenant, request id


class AbortRegistry:
    """How to abort each running request.

    >>> registry = AbortRegistry()
    >>> with registry.registered("t", "r1", lambda: True):
    ...     registry.abort("other", "r1"), registry.abort("t", "r1"), registry.abort("t", None)
    (0, 1, 1)
    """

    def __init__(self) -> None:
        self._running: defaultdict[Key, list[Callable[[], bool]]] = defaultdict(list)

    @contextlib.contextmanager
    def registered(self, tenant: str, rid: str, abort: Callable[[], bool]) -> Iterator[None]:
        """Calls `abort` if `rid` is aborted within the block. It returns whether it had something to abort."""
        key = (tenant, rid)
        self._running[key].append(abort)
        try:
            yield
        finally:
            self._running[key].remove(abort)
            if not self._running[key]:
                del self._running[key]

    def abort(self, tenant: str, rid: str | None) -> int:
        """Aborts the tenant's requests with this `rid`, or all of them; returns their number."""
        aborts = [
            abort
            for (owner, name), running in self._running.items()
            for abort in running
            if owner == tenant and rid in (None, name)
        ]
        return sum([abort() for abort in aborts])
