"""Sends the answer to a checked request, as one object or as a stream: what the protocols do in the same way.

A protocol has an `AnswerWriter`, which makes its object and writes its events, and passes it to `answer`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar, Self, TypeVar

from fastapi import Request
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.errors import PlaitError
from plait.runtime.server.app_state import state_of
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import ApiError, ConstraintParam, answered_error, as_api_error
from plait.runtime.server.generation.embedding import EmbeddingInput, EmbeddingOptions, embed_prompts, tokenize_inputs
from plait.runtime.server.generation.submission import RequestHandle, Submission, submit
from plait.runtime.server.generation.threads import LARGE_TOKENS, run_in_thread_if
from plait.runtime.server.http.response import (
    COMMENT,
    EVENT_STREAM,
    Events,
    FinalEvent,
    KeepAlive,
    begin_events,
    cancel_on_disconnect,
    json_response_in_pieces,
    sse_event,
    stream_response,
)
from plait.runtime.server.in_flight import DRAINED, current_request
from plait.runtime.server.rerun import run_again_if_lost

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"  # the end of OpenAI's and SGLang's streams

Batch = Sequence[tuple[int, CallUpdate]]
"""Updates that arrived together, as (index of the call, update)."""


class AnswerWriter:
    """Makes the object of one answer, or writes the events of its stream. Empty bytes: no event.

    raises_failures: a call that fails ends the answer; otherwise `write` gets its last update.
    """

    raises_failures: ClassVar[bool] = True

    def __enter__(self) -> Self:
        """Begins to write an answer, whose calls run until the end of the block."""
        return self

    def __exit__(self, *error: object) -> None: ...

    async def complete(self, handle: RequestHandle) -> Any:
        """The object, once all calls have ended."""
        results = await handle.results()
        is_large = any(result.encoded_logprobs for result in results) and num_tokens(results) > LARGE_TOKENS
        return await run_in_thread_if(is_large, self.body, results)

    def body(self, results: Sequence[CallResult]) -> Any:
        """The object, for `complete`. Called in a thread if it has many logprobs."""
        raise NotImplementedError

    async def start(self) -> None:
        """Waits for what must be known before the first event."""
        return

    async def write_before(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        """Large events that come before those of `write`, one by one."""
        return
        yield

    def write(self, batch: Batch) -> bytes:
        """The events of a batch of updates."""
        return b""

    def finish(self) -> bytes:
        """The events after the last update."""
        return DONE

    def fail(self, error: ApiError) -> bytes:
        """The events that end a stream which fails after its first event."""
        return error_event(error)


def num_tokens(results: Sequence[CallResult]) -> int:
    """The number of tokens of all answers."""
    return sum(len(result.token_ids) for result in results)


def error_event(error: ApiError) -> bytes:
    """The event of an error in OpenAI's form."""
    return sse_event(error.body())


async def run_in_turn(request: Request, run: Callable[[], Awaitable[T]]) -> T:
    """Waits for the request's turn and returns the value of `run()`; see `run_again_if_lost`.

    Raises ApiError 503 if the server ends meanwhile: the task that is cancelled then is this one, and not that of a
    stream, which has yet to send the error if it has sent a comment.
    """
    record, admission = current_request(), state_of(request).admission
    assert record is not None
    task_of_request, record.task = record.task, asyncio.current_task()
    try:
        await admission.wait_for_turn(record)
        return await run_again_if_lost(request, run)
    except asyncio.CancelledError:
        if record.code != DRAINED:
            raise
        raise admission.draining() from None
    finally:
        record.task = task_of_request


async def respond(
    request: Request,
    *,
    stream: bool,
    events: Callable[[], Events],
    complete: Callable[[], Coroutine[Any, Any, Any]],
    constraint_param: ConstraintParam = None,
    media_type: str = EVENT_STREAM,
    fail: Callable[[ApiError], bytes] = error_event,
    keep_alive: KeepAlive = COMMENT,
) -> Response:
    """Streams `events()` or returns the object of `complete()`; either is cancelled when the client disconnects.

    Both use the current client: they are called again if the runtime ends before the first event. Raises ApiError for
    another failure before it; `constraint_param` is where a failed constraint came from. `fail(error)` is the event of
    a failure after the first `keep_alive` of a stream that has waited for long.
    """

    def api_error(error: Exception) -> ApiError:
        return answered_error(error, constraint_param=constraint_param)

    try:
        if stream:
            begin = run_in_turn(request, lambda: begin_events(events()))
            return await stream_response(request, begin, lambda error: fail(api_error(error)), media_type, keep_alive)
        return await json_response_in_pieces(await complete_in_turn(request, complete))
    except PlaitError as error:
        raise api_error(error) from error


async def complete_in_turn(request: Request, complete: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Returns the value of `complete()`, once it is the request's turn. Cancelled when the client disconnects."""
    return await cancel_on_disconnect(request, run_in_turn(request, complete))


async def embed_in_turn(
    request: Request,
    model: ServedModel,
    inputs: Sequence[EmbeddingInput],
    param: str,
    options: EmbeddingOptions,
    *,
    truncate: bool = False,
    limit: int | None = None,
) -> list[CallResult]:
    """The embedding of each input, once it is the request's turn; see `tokenize_inputs`. Raises ApiError."""
    prompts = await tokenize_inputs(model.client, inputs, param, truncate=truncate, limit=limit)

    async def run() -> list[CallResult]:
        return await embed_prompts(model.client, prompts, options)

    try:
        return await complete_in_turn(request, run)
    except PlaitError as error:
        raise as_api_error(error) from error


async def answer(
    request: Request,
    model: ServedModel,
    submissions: Sequence[Submission],
    make_writer: Callable[[RequestHandle], AnswerWriter],
    *,
    stream: bool,
    constraint_param: ConstraintParam,
    media_type: str = EVENT_STREAM,
    fail: Callable[[ApiError], bytes] = error_event,
    keep_alive: KeepAlive = COMMENT,
) -> Response:
    """Runs the submissions; responds with what a writer makes of them. The options are those of `respond`.

    A runtime that ended has been replaced when the submissions are run again: `model.client` is read for each run.
    """

    async def complete() -> Any:
        async with submit(model.client, submissions) as handle:
            with make_writer(handle) as writer:
                return await writer.complete(handle)

    def events() -> Events:
        return _events(model.client, submissions, make_writer, constraint_param)

    return await respond(
        request,
        stream=stream,
        events=events,
        complete=complete,
        constraint_param=constraint_param,
        media_type=media_type,
        fail=fail,
        keep_alive=keep_alive,
    )


async def _events(
    client: Client,
    submissions: Sequence[Submission],
    make_writer: Callable[[RequestHandle], AnswerWriter],
    constraint_param: ConstraintParam,
) -> AsyncGenerator[bytes, None]:
    """Runs the submissions and streams the events of their updates.

    Raises a failure before the first event; the writer writes a later one.
    """
    async with submit(client, submissions) as handle:
        has_begun, num_open = False, len(handle.calls)
        with make_writer(handle) as writer:
            try:
                await writer.start()
                async with contextlib.aclosing(handle.progress(writer.raises_failures)) as batches:
                    async for batch in batches:
                        async for event in writer.write_before(batch):
                            has_begun = True
                            yield event
                        events = writer.write(batch)
                        num_open -= sum(update.finished for _, update in batch)
                        if not num_open:
                            yield FinalEvent(events + writer.finish())
                        elif events:
                            has_begun = True
                            yield events
            except Exception as error:
                if not has_begun:
                    raise
                yield writer.fail(answered_error(error, constraint_param=constraint_param))
