"""`POST /v1/programs`: runs a program and answers with its variables, whole or as they come.

Knows: the answer and the events. Must not know: how a program is checked or run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.server.answering import json_answer, named_event, stream_answer, unless_gone
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.json_body import read_json
from plait.runtime.server.openapi import documented
from plait.runtime.server.programs.compile import Step, compile_program
from plait.runtime.server.programs.run import Done, News, ProgramRun
from plait.runtime.server.programs.strand import Strand, Value, whole_value
from plait.runtime.server.programs.types import (
    CallAnswer,
    CallUsage,
    ProgramAnswer,
    ProgramRequest,
    ProgramUsage,
    TokenLogprobBody,
    TurnAnswer,
)
from plait.runtime.server.state import request_id, state_of, tenant_of
from plait.runtime.server.tokens import token_text

router = APIRouter()

NEVER = -9999.0  # the logprob of what cannot be; JSON has no infinity


@router.post("/v1/programs", **documented(ProgramRequest, ProgramAnswer, stream=True))
async def run_program(request: Request) -> Response:
    """Runs a program in one session. Streams its variables when `stream` is true."""
    body = await read_json(request, ProgramRequest)
    state = state_of(request)
    state.check_model(body.model)
    steps = compile_program(body, state.settings.max_choices)
    head = {"id": f"prog_{request_id(request).removeprefix('req-')}", "model": state.model_name}
    running = _Running(state.client, body, steps, head, tenant_of(request))
    try:
        if body.stream:
            return await stream_answer(request, running.events())
        return json_answer(await unless_gone(request, running.whole()))
    except PlaitError as error:
        raise as_api_error(error) from error


class _Running:
    """One request's run."""

    def __init__(
        self, client: Client, body: ProgramRequest, steps: tuple[Step, ...], head: dict[str, str], tenant: str
    ) -> None:
        self._client, self._steps, self._head, self._tenant = client, steps, head, tenant
        self._variables: dict[str, Value] = {
            name: value if isinstance(value, str) else [*value] for name, value in (body.variables or {}).items()
        }
        self._salt, self._priority = body.cache_salt or "", body.priority or 0

    async def whole(self) -> ProgramAnswer:
        return await self._run(ProgramRun(self._client))

    async def _run(self, run: ProgramRun) -> ProgramAnswer:
        where = dict(tenant=self._tenant, cache_salt=self._salt, priority=self._priority)
        async with run.running(self._steps, self._variables, **where) as strand:  # type: ignore[arg-type]
            return await self._answer(run, strand)

    async def _answer(self, run: ProgramRun, strand: Strand) -> ProgramAnswer:
        calls = [self._call(done) for done in run.done]
        usages = [call.usage for call in calls]
        prompt, completion = sum(each.prompt_tokens for each in usages), sum(each.completion_tokens for each in usages)
        cached = sum(each.cached_tokens for each in usages)
        return ProgramAnswer(
            id=self._head["id"],
            created=int(time.time()),
            model=self._head["model"],
            variables={name: await whole_value(value) for name, value in strand.variables.items()},
            text=await strand.text(),
            messages=[TurnAnswer(role, await strand.text(first, end)) for role, first, end in strand.turns],
            calls=calls,
            usage=ProgramUsage(prompt, cached, completion, prompt + completion),
        )

    def _call(self, done: Done) -> CallAnswer:
        result = done.result
        usage = CallUsage(
            result.usage.prompt_tokens,
            result.usage.cached_tokens,
            result.usage.completion_tokens,
            result.usage.forced_tokens,
        )
        logprobs = None
        if result.logprobs is not None:
            logprobs = [
                TokenLogprobBody(
                    each.token_id,
                    token_text(self._client, each.token_id),
                    max(each.logprob, NEVER),
                    [(token, max(value, NEVER)) for token, value in each.top],
                )
                for each in result.logprobs
            ]
        scores = [max(score, NEVER) for score in result.choice.scores] if result.choice is not None else None
        step = done.step
        return CallAnswer(
            step.name,
            step.path,
            done.sample,
            done.value,
            result.finish_reason,
            result.matched,
            result.violation,
            scores,
            logprobs,
            usage,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """program.created, then each variable's deltas and its end as they come, then program.completed."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        run = ProgramRun(self._client, lambda news: queue.put_nowait(self._event(news)))
        task = asyncio.create_task(self._run(run))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        has_begun = False
        try:
            while (event := await queue.get()) is not None:
                if not has_begun:
                    yield named_event("program.created", {"type": "program.created", **self._head})
                has_begun = True
                yield event
            yield named_event("program.completed", {"type": "program.completed", "program": await task})
        except Exception as error:
            if not has_begun:
                raise
            yield named_event("error", {"type": "error", **as_api_error(error).body()})
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _event(self, news: News | Done) -> bytes:
        about: dict[str, Any] = {"name": news.step.name, "path": news.step.path, "sample": news.sample}
        if isinstance(news, News):
            return named_event("variable.delta", {"type": "variable.delta", **about, "delta": news.delta})
        told = {"value": news.value, "finish_reason": news.result.finish_reason}
        return named_event("variable.done", {"type": "variable.done", **about, **told})
