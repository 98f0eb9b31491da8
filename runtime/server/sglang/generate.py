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
from plait.runtime.client.following import follow
from plait.runtime.errors import PlaitError
from plait.runtime.server.answering import json_answer, sse, stream_answer, unless_gone
from plait.runtime.server.errors import as_api_error, invalid
from plait.runtime.server.json_body import read_json
from plait.runtime.server.openapi import documented
from plait.runtime.server.running import Run, running
from plait.runtime.server.sglang.answers import Writer
from plait.runtime.server.sglang.registry import Registry
from plait.runtime.server.sglang.request import Asked, asked_of, is_single
from plait.runtime.server.sglang.types import Generated, GenerateRequest
from plait.runtime.server.state import request_id, state_of, tenant_of

router = APIRouter()
MAX_JOINED = 1024

DONE = b"data: [DONE]\n\n"


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's names of the states whose texts were joined, and of the one that has them now."""

    src_rids: Annotated[list[str], Meta(max_length=MAX_JOINED)]
    dst_rid: str


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`rid`: as it was given to `/generate`. `abort_all`: whatever this client's key runs there."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: None = None


@router.post("/generate", **documented(GenerateRequest, Generated | list[Generated], stream=True))
async def generate(request: Request) -> Response:
    """Continues texts. One prompt with n=1 gives an object, all else a list. Streams when `stream` is true."""
    body = await read_json(request, GenerateRequest)
    state, tenant = state_of(request), tenant_of(request)
    asked = await asked_of(body, state.client, tenant, request_id(request), state.settings.max_choices)
    single = is_single(body) and asked[0].work.n == 1
    registry = _registry(request)
    param = asked[0].constraint_param
    try:
        if body.stream:
            return await stream_answer(request, _events(state.client, asked, single, registry))
        return json_answer(await unless_gone(request, _whole(state.client, asked, single, registry)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=param) from error


@router.post("/abort_request", **documented(AbortRequest, errors=(400, 413, 415, 500, 503)))
async def abort_request(request: Request) -> Response:
    """Ends requests that run: their answers end with what they have, finish_reason "abort"."""
    body = await read_json(request, AbortRequest)
    if not body.rid and not body.abort_all:
        raise invalid("give 'rid', or set 'abort_all' to true", "rid", "missing_required_parameter")
    count = _registry(request).abort(tenant_of(request), None if body.abort_all else body.rid)
    return json_answer({"aborted": count})


@router.post("/concate_and_append_request", **documented(JoinRequest, errors=(400, 413, 415, 500, 503)))
async def concate_and_append_request(request: Request) -> Response:
    """SGLang's language sends this at `join("concate_and_append")`, when it has joined the texts itself. There is
    nothing left to do: the next call sends the joined text, which is computed exactly from where the cache ends."""
    await read_json(request, JoinRequest)
    return json_answer({})


def _registry(request: Request) -> Registry:
    app = request.app.state
    if not hasattr(app, "sglang_registry"):
        app.sglang_registry = Registry()
    registry: Registry = app.sglang_registry
    return registry


@contextlib.contextmanager
def _writers(
    client: Client, asked: Sequence[Asked], run: Run, single: bool, registry: Registry
) -> Iterator[list[Writer]]:
    """A writer for each call; while this is open, the calls can be aborted by their rid."""
    owners = [each for each in asked for _ in range(each.work.n)]
    calls = enumerate(zip(owners, run.calls, strict=True))
    writers = [Writer(client, each, call, None if single else index) for index, (each, call) in calls]

    def end(rid: str) -> None:
        for owner, writer, call in zip(owners, writers, run.calls, strict=True):
            if owner.rid == rid and not call.done():
                writer.aborted = True
                call.abort()

    with contextlib.ExitStack() as stack:
        for rid, tenant in {(each.rid, each.work.tenant) for each in asked}:
            stack.enter_context(registry.holding(tenant, rid, lambda rid=rid: end(rid)))  # type: ignore[misc]
        yield writers


async def _whole(client: Client, asked: Sequence[Asked], single: bool, registry: Registry) -> Any:
    async with running(client, [each.work for each in asked]) as run:
        with _writers(client, asked, run, single, registry) as writers:
            async with contextlib.aclosing(follow(run.calls, only_ends=True)) as batches:
                async for batch in batches:
                    for index, news in batch:
                        writers[index].push(news)
        bodies = [writer.body() for writer in writers]
    for body in bodies:
        body.pop("index", None)
    return bodies[0] if single else bodies


async def _events(
    client: Client, asked: Sequence[Asked], single: bool, registry: Registry
) -> AsyncGenerator[bytes, None]:
    async with running(client, [each.work for each in asked]) as run:
        has_begun = False
        with _writers(client, asked, run, single, registry) as writers:
            try:
                async with contextlib.aclosing(follow(run.calls)) as batches:
                    async for batch in batches:
                        seen = [index for index, news in batch if writers[index].push(news)]
                        if seen:
                            has_begun = True
                            yield b"".join(sse(writers[index].body()) for index in seen)
            except Exception as error:
                if not has_begun:
                    raise
                yield sse(as_api_error(error, constraint_param=asked[0].constraint_param).body())
            yield DONE
