"""`POST /v1/programs`: runs a program and returns its variables, as one answer or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.constrained.validation_process import validation_error_within
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import UNREAD_STREAM
from plait.runtime.errors import Aborted
from plait.runtime.server.app_state import request_id, tenant_of, use_model_in_turn
from plait.runtime.server.chat.template_settings import program_template, template_variables
from plait.runtime.server.errors import ApiError, answered_error
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.logprobs import MIN_LOGPROB, token_text
from plait.runtime.server.generation.submission import MAX_UNREAD_BYTES
from plait.runtime.server.generation.threads import LARGE_TOKENS, run_in_thread_if
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import encoded, json_response_in_pieces, named_sse_event
from plait.runtime.server.protocols.answer import respond
from plait.runtime.server.protocols.programs.branch import ProgramBranch, Value, resolve_value
from plait.runtime.server.protocols.programs.program_compiler import CompiledProgram, compile_program
from plait.runtime.server.protocols.programs.program_run import FinishedCall, ProgramRun, TextDelta
from plait.runtime.server.protocols.programs.types import (
    CallAnswer,
    CallUsage,
    ProgramAnswer,
    ProgramRequest,
    ProgramUsage,
    TokenLogprobBody,
    TurnAnswer,
)
from plait.runtime.server.protocols.shared import extensions, timeout_of

router = APIRouter()
EVENT_BYTES = 100  # about the memory of an event beside its text


@router.post("/v1/programs", **documented(ProgramRequest, ProgramAnswer, stream=True))
async def run_program(request: Request) -> Response:
    """Runs a program in one session. Streams its variables when `stream` is true."""
    body = await read_json(request, ProgramRequest)
    model = await use_model_in_turn(request, body.model, timeout_of(body.defaults))
    program = compile_program(body, model.settings.max_choices)
    envelope = {"id": f"prog_{request_id(request).removeprefix('req-')}", "model": body.model}

    def execution() -> _Execution:
        return _Execution(model.client, body, program, envelope, tenant_of(request))

    return await respond(
        request,
        stream=bool(body.stream),
        events=lambda: execution().events(),
        complete=lambda: execution().run(),
        fail=_error_event,
    )


def _error_event(error: ApiError) -> bytes:
    return named_sse_event("error", {"type": "error", **error.body()})


def _call_usage(result: CallResult) -> CallUsage:
    usage = result.usage
    return CallUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.forced_tokens)


def _num_logprobs(result: CallResult) -> int:
    return 0 if result.encoded_logprobs is None else len(result.token_ids)


class _EventQueue:
    """The events of a program that its client has not taken, bounded in bytes; None is the end."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_bytes = 0
        self.has_dropped = False

    def put(self, event: bytes, run: ProgramRun) -> None:
        """Adds an event. Aborts `run` if too much is waiting, and drops what it still reports."""
        if self._num_bytes > MAX_UNREAD_BYTES:
            self.has_dropped = True
            run.abort(UNREAD_STREAM)
            return
        self._num_bytes += len(event) + EVENT_BYTES
        self._queue.put_nowait(event)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def get(self) -> bytes | None:
        event = await self._queue.get()
        if event is not None:
            self._num_bytes -= len(event) + EVENT_BYTES
        return event


class _Execution:
    """Runs the program of one request."""

    def __init__(
        self, client: Client, body: ProgramRequest, program: CompiledProgram, envelope: dict[str, str], tenant: str
    ) -> None:
        self._client, self._program, self._envelope, self._tenant = client, program, envelope, tenant
        self._variables: dict[str, Value] = {
            name: value if isinstance(value, str) else [*value] for name, value in (body.variables or {}).items()
        }
        self._salt, self._priority = body.cache_salt or "", body.priority or 0
        self._template = program_template(client, template_variables(body.chat_template_kwargs, body.enable_thinking))

    async def run(self) -> ProgramAnswer:
        return await self._run(ProgramRun(self._client, template=self._template))

    async def _run(self, run: ProgramRun) -> ProgramAnswer:
        session_options = dict(tenant=self._tenant, cache_salt=self._salt, priority=self._priority)
        async with run.running(self._program, self._variables, **session_options) as program_branch:  # type: ignore[arg-type]
            return await self._answer(run, program_branch)

    async def _answer(self, run: ProgramRun, program_branch: ProgramBranch) -> ProgramAnswer:
        is_large = sum(_num_logprobs(done.result) for done in run.done) > LARGE_TOKENS
        calls = [
            await run_in_thread_if(is_large, self._call_answer, done, await find_violation(done.result))
            for done in run.done
        ]
        usages = [call.usage for call in calls]
        prompt, completion = (
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        )
        cached = sum(usage.cached_tokens for usage in usages)
        return ProgramAnswer(
            id=self._envelope["id"],
            created=int(time.time()),
            model=self._envelope["model"],
            variables={name: await resolve_value(value) for name, value in program_branch.variables.items()},
            text=await program_branch.text(),
            messages=[
                TurnAnswer(turn.role, await program_branch.text(turn.start, turn.stop)) for turn in program_branch.turns
            ],
            calls=calls,
            usage=ProgramUsage(prompt, cached, completion, prompt + completion),
            warnings=request_warnings(),
        )

    def _call_answer(self, done: FinishedCall, violation: str | None) -> CallAnswer:
        result = done.result
        logprobs = None
        if result.logprobs is not None:
            logprobs = [
                encoded(
                    TokenLogprobBody(
                        entry.token_id,
                        token_text(self._client, entry.token_id),
                        max(entry.logprob, MIN_LOGPROB),
                        [(token, max(value, MIN_LOGPROB)) for token, value in entry.top],
                    )
                )
                for entry in result.logprobs
            ]
        scores = [max(score, MIN_LOGPROB) for score in result.choice.scores] if result.choice is not None else None
        step = done.step
        return CallAnswer(
            step.name,
            step.path,
            done.sample,
            done.value,
            result.finish_reason,
            result.matched,
            violation,
            scores,
            logprobs,
            _call_usage(result),
            list(result.warnings) or msgspec.UNSET,
            *extensions(self._client, result),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """program.created, the deltas and the end of each variable as they come, then program.completed."""
        events = _EventQueue()
        run = ProgramRun(self._client, lambda update: events.put(self._event(update), run), self._template)
        task = asyncio.create_task(self._run(run))
        task.add_done_callback(lambda _: events.end())
        has_begun = False
        try:
            while (event := await events.get()) is not None:
                if not has_begun:
                    yield named_sse_event("program.created", {"type": "program.created", **self._envelope})
                has_begun = True
                yield event
            if events.has_dropped:
                raise Aborted(UNREAD_STREAM)
            program = msgspec.Raw((await json_response_in_pieces(await task)).body)
            yield named_sse_event("program.completed", {"type": "program.completed", "program": program})
        except Exception as error:
            if not has_begun:
                raise
            yield _error_event(answered_error(error))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # nobody else takes its error

    def _event(self, update: TextDelta | FinishedCall) -> bytes:
        source: dict[str, Any] = {"name": update.step.name, "path": update.step.path, "sample": update.sample}
        if isinstance(update, TextDelta):
            return named_sse_event("variable.delta", {"type": "variable.delta", **source, "delta": update.delta})
        result = update.result
        value = {"value": update.value, "finish_reason": result.finish_reason, "usage": _call_usage(result)}
        return named_sse_event("variable.done", {"type": "variable.done", **source, **value})


# -- violation ------------------------------------------------------------------------------------
# Validates the texts of lenient constraints without stopping the event loop, however long a client's schema takes.

# Threads of their own: validations that run into their time limit must not delay what else runs in threads.
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="plait-validation")


async def find_violation(result: CallResult) -> str | None:
    """As `CallResult.violation`, but computed in a process with a time limit."""
    if result.lenient_constraint is None:
        return None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, validation_error_within, result.lenient_constraint, result.text)
