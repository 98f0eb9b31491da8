"""`/generate`, `/abort_request` and `/concate_and_append_request`, for SGLang's clients and language."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request
from msgspec import UNSET, Meta
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.client.stream import stream_updates
from plait.runtime.server.app_state import request_id, tenant_of, use_model
from plait.runtime.server.errors import answered_error, invalid
from plait.runtime.server.generation.abort_registry import AbortRegistry
from plait.runtime.server.generation.submission import RequestHandle, submit
from plait.runtime.server.generation.threads import LARGE_TOKENS, run_in_thread_if
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response, sse_event
from plait.runtime.server.in_flight import current_request
from plait.runtime.server.protocols.answer import DONE, Batch, respond
from plait.runtime.server.protocols.sglang.request import PromptRequest, is_single, parse_generate_request
from plait.runtime.server.protocols.sglang.response import SglangResponseWriter
from plait.runtime.server.protocols.sglang.types import GenerateRequest, GenerateResponse
from plait.runtime.server.protocols.shared import StrictStruct

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
    single = is_single(body) and prompt_requests[0].submission.n == 1
    registry = _registry(request)
    aborted = _register_wait(registry, tenant, prompt_requests)
    return await respond(
        request,
        stream=bool(body.stream),
        events=lambda: _events(model.client, prompt_requests, single, registry, aborted),
        complete=lambda: _complete_response(model.client, prompt_requests, single, registry, aborted),
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


@contextlib.contextmanager
def _writers(
    client: Client,
    prompt_requests: Sequence[PromptRequest],
    handle: RequestHandle,
    single: bool,
    registry: AbortRegistry,
    aborted: Collection[str],
) -> Iterator[list[SglangResponseWriter]]:
    """A writer for each call. Calls can be aborted by their rid within the block; those of `aborted` are."""
    owners = [prompt_request for prompt_request in prompt_requests for _ in range(prompt_request.submission.n)]
    writers = [
        SglangResponseWriter(client, owner, handle, call, None if single else index)
        for index, (owner, call) in enumerate(zip(owners, handle.calls, strict=True))
    ]

    def abort(rid: str) -> bool:
        for owner, writer, call in zip(owners, writers, handle.calls, strict=True):
            if owner.rid == rid and not call.done():
                writer.aborted = True
                call.abort()
        return True

    with contextlib.ExitStack() as stack:
        for rid, tenant in {(owner.rid, owner.submission.tenant) for owner in owners}:
            stack.enter_context(registry.registered(tenant, rid, lambda rid=rid: abort(rid)))  # type: ignore[misc]
        for rid in aborted:
            abort(rid)
        yield writers


async def _complete_response(
    client: Client,
    prompt_requests: Sequence[PromptRequest],
    single: bool,
    registry: AbortRegistry,
    aborted: Collection[str],
) -> GenerateResponse | list[GenerateResponse]:
    async with submit(client, [prompt_request.submission for prompt_request in prompt_requests]) as handle:
        with _writers(client, prompt_requests, handle, single, registry, aborted) as writers:
            async with contextlib.aclosing(stream_updates(handle.calls, only_final=True)) as batches:
                async for batch in batches:
                    is_large = sum(len(update.token_ids) for _, update in batch) > LARGE_TOKENS
                    await run_in_thread_if(is_large, _push, writers, batch)
        responses = [await run_in_thread_if(writer.is_large, writer.response) for writer in writers]
    for response in responses:
        response.index = UNSET
    return responses[0] if single else responses


def _push(writers: Sequence[SglangResponseWriter], batch: Batch) -> list[SglangResponseWriter]:
    """Adds updates. Returns the writers whose responses changed."""
    return [writers[index] for index, update in batch if writers[index].push(update)]


def _chunks(writers: Sequence[SglangResponseWriter]) -> bytes:
    return b"".join(sse_event(writer.response()) for writer in writers)


async def _events(
    client: Client,
    prompt_requests: Sequence[PromptRequest],
    single: bool,
    registry: AbortRegistry,
    aborted: Collection[str],
) -> AsyncGenerator[bytes, None]:
    async with submit(client, [prompt_request.submission for prompt_request in prompt_requests]) as handle:
        has_begun = False
        with _writers(client, prompt_requests, handle, single, registry, aborted) as writers:
            try:
                async with contextlib.aclosing(handle.progress(raise_on_failure=False)) as batches:
                    async for batch in batches:
                        changed = _push(writers, batch)
                        if changed:
                            has_begun = True
                            yield await run_in_thread_if(any(writer.is_large for writer in changed), _chunks, changed)
            except Exception as error:
                if not has_begun:
                    raise
                yield sse_event(answered_error(error, constraint_param=prompt_requests[0].constraint_param).body())
            yield DONE
