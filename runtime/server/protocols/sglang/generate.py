"""`/generate`, `/abort_request` and `/concate_and_append_request`, as SGLang's own clients and language use them.

Knows: the order of chunks. Must not know: SGLang's fields, models.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.client.stream import stream_updates
from plait.runtime.errors import PlaitError
from plait.runtime.server.app_state import request_id, state_of, tenant_of
from plait.runtime.server.errors import as_api_error, invalid
from plait.runtime.server.generation.submission import RequestHandle, submit
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import cancel_on_disconnect, json_response, sse_event, stream_response
from plait.runtime.server.protocols.sglang.abort_registry import AbortRegistry
from plait.runtime.server.protocols.sglang.request import PromptRequest, is_single, parse_generate_request
from plait.runtime.server.protocols.sglang.response import SglangResponseWriter
from plait.runtime.server.protocols.sglang.types import GenerateRequest, GenerateResponse

router = APIRouter()
MAX_HEALED_TOKENS = 1024

DONE = b"data: [DONE]\n\n"


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's names of the states whose texts were joined, and of the one that has them now."""

    src_rids: Annotated[list[str], Meta(max_length=MAX_HEALED_TOKENS)]
    dst_rid: str


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`rid`: as it was given to `/generate`. `abort_all`: whatever this client's key runs there."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: None = None


@router.post("/generate", **documented(GenerateRequest, GenerateResponse | list[GenerateResponse], stream=True))
async def generate(request: Request) -> Response:
    """Continues texts. One prompt with n=1 gives an object, all else a list. Streams when `stream` is true."""
    body = await read_json(request, GenerateRequest)
    state, tenant = state_of(request), tenant_of(request)
    prompt_requests = await parse_generate_request(
        body, state.client, tenant, request_id(request), state.settings.max_choices
    )
    single = is_single(body) and prompt_requests[0].submission.n == 1
    registry = _registry(request)
    param = prompt_requests[0].constraint_param
    try:
        if body.stream:
            return await stream_response(request, _events(state.client, prompt_requests, single, registry))
        return json_response(
            await cancel_on_disconnect(request, _complete_response(state.client, prompt_requests, single, registry))
        )
    except PlaitError as error:
        raise as_api_error(error, constraint_param=param) from error


@router.post("/abort_request", **documented(AbortRequest, errors=(400, 413, 415, 500, 503)))
async def abort_request(request: Request) -> Response:
    """Ends requests that run: their answers end with what they have, finish_reason "abort"."""
    body = await read_json(request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise invalid("give 'rid', or set 'abort_all' to true", "rid", "missing_required_parameter")
    count = _registry(request).abort(tenant_of(request), None if body.abort_all else body.rid)
    return json_response({"aborted": count})


@router.post("/concate_and_append_request", **documented(JoinRequest, errors=(400, 413, 415, 500, 503)))
async def concate_and_append_request(request: Request) -> Response:
    """SGLang's language sends this at `join("concate_and_append")`, when it has joined the texts itself. There is
    nothing left to do: the next call sends the joined text, which is computed exactly from where the cache ends."""
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
) -> Iterator[list[SglangResponseWriter]]:
    """A writer for each call; while this is open, the calls can be aborted by their rid."""
    owners = [each for each in prompt_requests for _ in range(each.submission.n)]
    calls = enumerate(zip(owners, handle.calls, strict=True))
    writers = [SglangResponseWriter(client, each, call, None if single else index) for index, (each, call) in calls]

    def end(rid: str) -> None:
        for owner, writer, call in zip(owners, writers, handle.calls, strict=True):
            if owner.rid == rid and not call.done():
                writer.aborted = True
                call.abort()

    with contextlib.ExitStack() as stack:
        for rid, tenant in {(each.rid, each.submission.tenant) for each in prompt_requests}:
            stack.enter_context(registry.registered(tenant, rid, lambda rid=rid: end(rid)))  # type: ignore[misc]
        yield writers


async def _complete_response(
    client: Client, prompt_requests: Sequence[PromptRequest], single: bool, registry: AbortRegistry
) -> Any:
    async with submit(client, [each.submission for each in prompt_requests]) as handle:
        with _writers(client, prompt_requests, handle, single, registry) as writers:
            async with contextlib.aclosing(stream_updates(handle.calls, only_final=True)) as batches:
                async for batch in batches:
                    for index, update in batch:
                        writers[index].push(update)
        bodies = [writer.body() for writer in writers]
    for body in bodies:
        body.pop("index", None)
    return bodies[0] if single else bodies


async def _events(
    client: Client, prompt_requests: Sequence[PromptRequest], single: bool, registry: AbortRegistry
) -> AsyncGenerator[bytes, None]:
    async with submit(client, [each.submission for each in prompt_requests]) as handle:
        has_begun = False
        with _writers(client, prompt_requests, handle, single, registry) as writers:
            try:
                async with contextlib.aclosing(stream_updates(handle.calls)) as batches:
                    async for batch in batches:
                        seen = [index for index, update in batch if writers[index].push(update)]
                        if seen:
                            has_begun = True
                            yield b"".join(sse_event(writers[index].body()) for index in seen)
            except Exception as error:
                if not has_begun:
                    raise
                yield sse_event(as_api_error(error, constraint_param=prompt_requests[0].constraint_param).body())
            yield DONE
