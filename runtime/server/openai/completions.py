"""`/v1/completions`: text or tokens in, text out, one or many.

Knows: OpenAI's completion objects. Must not know: chat templates, sockets.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.following import Progress
from plait.runtime.errors import PlaitError
from plait.runtime.messages import TokenLogprob
from plait.runtime.server.answering import Last, json_answer, sse, stream_answer, unless_gone
from plait.runtime.server.errors import as_api_error, invalid, unsupported
from plait.runtime.server.json_body import read_json
from plait.runtime.server.logprobs import LogprobFeed
from plait.runtime.server.openai.chat_answers import NEVER
from plait.runtime.server.openai.fields import (
    FinishReason,
    Sampled,
    UsageBody,
    constraint_of,
    count_of,
    room_for_answer,
    sampling_of,
    usage_body,
)
from plait.runtime.server.openapi import documented
from plait.runtime.server.running import Run, Work, running, tokenize
from plait.runtime.server.state import State, request_id, state_of, tenant_of
from plait.runtime.server.whole_values import finishing

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_LOGPROBS = 20
MAX_BEST_OF = 20


class CompletionRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    """`prompt`: a text, a list of texts, a list of token ids, or a list of such lists."""

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class TextLogprobs(msgspec.Struct):
    """Per token: its text, its logprob (null for the first token of an echoed prompt), the likeliest, its offset."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, kw_only=True):
    """OpenAI's completion object, or one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


@dataclass
class Plan:
    """A checked request."""

    works: list[Work]
    echoes: list[str]  # per work
    n: int
    best_of: int
    logprobs: int | None
    include_usage: bool
    constraint_param: str | None


@router.post("/v1/completions", **documented(CompletionRequest, Completion, stream=True))
async def create_completion(request: Request) -> Response:
    """Continues a text. Streams when `stream` is true."""
    body = await read_json(request, CompletionRequest)
    state = state_of(request)
    state.check_model(body.model)
    plan = await _plan(body, state, tenant_of(request))
    head = {"id": "cmpl-" + request_id(request)[4:], "created": int(time.time()), "model": state.model_name}
    try:
        if body.stream:
            return await stream_answer(request, _events(state, plan, head))
        return json_answer(await unless_gone(request, _whole(state.client, plan, head)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=plan.constraint_param) from error


async def _plan(body: CompletionRequest, state: State, tenant: str) -> Plan:
    settings = state.settings
    if body.suffix:
        raise unsupported("suffix", "is not supported: this model does not fill in")
    n = count_of(body.n, settings.max_choices)
    best_of = count_of(body.best_of, MAX_BEST_OF, name="best_of") if body.best_of is not None else n
    if best_of < n:
        raise invalid("'best_of' must not be less than 'n'", "best_of")
    if best_of > n and body.stream:
        raise invalid("'best_of' above 'n' cannot be streamed", "best_of")
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is only for streams", "stream_options")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise invalid(f"'logprobs' must be from 0 to {MAX_LOGPROBS}", "logprobs")
    constraint, constraint_param = constraint_of(body)
    prompts = await _prompts(body, state.client)
    if len(prompts) * best_of > settings.max_choices:
        raise invalid(f"prompts times answers must not exceed {settings.max_choices}", "prompt")
    with_logprobs = body.logprobs is not None or best_of > n
    works = []
    for ids, _ in prompts:
        room = room_for_answer(state.client.model.context_length, ids, "prompt")
        most = min(DEFAULT_MAX_TOKENS, room) if body.max_tokens is None else body.max_tokens
        sampling = sampling_of(body, max_tokens=most, logprobs=with_logprobs, top_logprobs=body.logprobs or 0)
        sampling = finishing(sampling, constraint, body.complete)
        salt, priority = body.cache_salt or "", body.priority or 0
        of_prompt = body.logprobs if body.echo else None
        works.append(Work(ids, sampling, constraint, best_of, tenant, salt, priority, of_prompt))
    echoes = [text if body.echo else "" for _, text in prompts]
    options = body.stream_options
    usage = bool(options and options.include_usage)
    return Plan(works, echoes, n, best_of, body.logprobs, usage, constraint_param)


async def _prompts(body: CompletionRequest, client: Client) -> list[tuple[list[int], str]]:
    """(token ids, text) of each prompt."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and all(isinstance(item, int) for item in given)):
        given = [given]
    if not given:
        raise invalid("'prompt' must not be empty", "prompt")
    prompts = []
    for index, prompt in enumerate(given):
        param = f"prompt[{index}]" if len(given) > 1 else "prompt"
        if isinstance(prompt, str):
            ids, text = await tokenize(client, [(prompt, False)]), prompt
        elif isinstance(prompt, list):
            width = client.model.vocab_size
            room_for_answer(client.model.context_length, prompt, param)  # first: a body may hold millions of tokens
            if any(not 0 <= token < width for token in prompt):
                raise invalid(f"'{param}' holds a token id that is not from 0 to {width - 1}", param)
            ids, text = prompt, client.tokenizer.decode(prompt)
        else:
            raise invalid("'prompt' mixes token ids with texts or lists", "prompt")
        if not ids:
            raise invalid(f"'{param}' is empty", param)
        prompts.append((ids, text))
    return prompts


async def _whole(client: Client, plan: Plan, head: dict[str, Any]) -> Completion:
    async with running(client, plan.works) as run:
        scored = await run.prompt_logprobs()
        results = await run.results()
        choices: list[CompletionChoice] = []
        for at in range(len(plan.works)):
            group = results[at * plan.best_of : (at + 1) * plan.best_of]
            for result in _best(group, plan.n):
                writer = _Writer(client, plan, at, scored[at])
                news = Progress(result.text, result.token_ids, result.logprobs or [], True)
                text, logprobs = writer.write(news)
                choices.append(CompletionChoice(text, len(choices), logprobs, result.finish_reason))
        return Completion(**head, choices=choices, usage=msgspec.convert(usage_body(run.usage()), UsageBody))


def _best(results: list[CallResult], n: int) -> list[CallResult]:
    """The n with the highest mean logprob of their tokens."""
    if len(results) == n:
        return results

    def mean(result: CallResult) -> float:
        values = [entry.logprob for entry in result.logprobs or []]
        return sum(values) / len(values) if values else 0.0

    return sorted(results, key=mean, reverse=True)[:n]


async def _events(state: State, plan: Plan, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    head = {"id": head["id"], "object": "text_completion", "created": head["created"], "model": head["model"]}
    usage = {"usage": None} if plan.include_usage else {}
    async with running(state.client, plan.works) as run:
        told = False
        try:
            scored = await run.prompt_logprobs()
            works = range(len(plan.works))
            writers = [_Writer(state.client, plan, at, scored[at]) for at in works for _ in range(plan.n)]
            num_open = len(run.calls)
            async with contextlib.aclosing(run.progress()) as batches:
                async for batch in batches:
                    chunks = []
                    for index, news in batch:
                        num_open -= news.ended
                        text, logprobs = writers[index].write(news)
                        reason = run.calls[index].result(0).finish_reason if news.ended else None
                        if text or reason or logprobs:
                            choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
                            chunks.append(sse({**head, "choices": [choice], **usage}))
                    if not num_open:
                        yield Last(b"".join([*chunks, _end(run, plan, head)]))
                    elif chunks:
                        told = True
                        yield b"".join(chunks)
        except Exception as error:
            if not told:
                raise
            answer = as_api_error(error, constraint_param=plan.constraint_param)
            yield sse(answer.body())


def _end(run: Run, plan: Plan, head: dict[str, Any]) -> bytes:
    done = b"data: [DONE]\n\n"
    return sse({**head, "choices": [], "usage": usage_body(run.usage())}) + done if plan.include_usage else done


class _Writer:
    """One answer's texts and logprobs as they come, the echoed prompt first."""

    def __init__(self, client: Client, plan: Plan, at: int, scored: Sequence[TokenLogprob]) -> None:
        self._token_bytes = client.tokenizer.vocabulary.token_bytes
        self._feed = LogprobFeed(self._token_bytes) if plan.logprobs is not None else None
        self._top, self._echo, self._offset = plan.logprobs, plan.echoes[at], 0
        self._prompt: list[TokenLogprob] = []
        if plan.logprobs is not None and plan.works[at].prompt_logprobs is not None:
            self._prompt = [TokenLogprob(plan.works[at].prompt_ids[0], math.nan), *scored]

    def write(self, news: Progress) -> tuple[str, TextLogprobs | None]:
        text, self._echo = self._echo + news.text, ""
        if self._feed is None:
            return text, None
        entries, self._prompt = self._prompt + self._feed.push(news), []
        return text, self._logprobs(entries) if entries or news.ended else None

    def _logprobs(self, entries: list[TokenLogprob]) -> TextLogprobs:
        told = TextLogprobs([], [], [] if self._top else None, [])
        for entry in entries:
            word, is_first = self._word(entry.token_id), math.isnan(entry.logprob)
            told.tokens.append(word)
            told.token_logprobs.append(None if is_first else max(entry.logprob, NEVER))
            if told.top_logprobs is not None:
                top = {self._word(token): max(value, NEVER) for token, value in entry.top}
                told.top_logprobs.append(None if is_first else top)
            told.text_offset.append(self._offset)
            self._offset += len(word)
        return told

    def _word(self, token: int) -> str:
        return self._token_bytes[token].decode("utf-8", "replace")
