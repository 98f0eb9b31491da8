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
from plait.runtime.client.stream import CallUpdate
from plait.runtime.errors import PlaitError
from plait.runtime.messages import TokenLogprob
from plait.runtime.server.app_state import AppState, request_id, state_of, tenant_of
from plait.runtime.server.errors import as_api_error, invalid, unsupported
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.logprobs import LogprobAligner
from plait.runtime.server.generation.submission import RequestHandle, Submission, submit, tokenize
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import (
    FinalEvent,
    cancel_on_disconnect,
    json_response,
    sse_event,
    stream_response,
)
from plait.runtime.server.protocols.openai.chat_response import MIN_LOGPROB
from plait.runtime.server.protocols.openai.fields import (
    FinishReason,
    SamplingFields,
    UsageBody,
    checked_count,
    constraint_of,
    remaining_context,
    sampling_of,
    usage_body,
)

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_LOGPROBS = 20
MAX_BEST_OF = 20


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
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
class CheckedCompletion:
    """A checked request."""

    submissions: list[Submission]
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
    checked = await _check(body, state, tenant_of(request))
    envelope = {"id": "cmpl-" + request_id(request)[4:], "created": int(time.time()), "model": state.model_name}
    try:
        if body.stream:
            return await stream_response(request, _events(state, checked, envelope))
        return json_response(await cancel_on_disconnect(request, _complete_response(state.client, checked, envelope)))
    except PlaitError as error:
        raise as_api_error(error, constraint_param=checked.constraint_param) from error


async def _check(body: CompletionRequest, state: AppState, tenant: str) -> CheckedCompletion:
    settings = state.settings
    if body.suffix:
        raise unsupported("suffix", "is not supported: this model does not fill in")
    n = checked_count(body.n, settings.max_choices)
    best_of = checked_count(body.best_of, MAX_BEST_OF, name="best_of") if body.best_of is not None else n
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
    submissions = []
    for ids, _ in prompts:
        context_left = remaining_context(state.client.model.context_length, ids, "prompt")
        max_tokens = min(DEFAULT_MAX_TOKENS, context_left) if body.max_tokens is None else body.max_tokens
        sampling = sampling_of(body, max_tokens=max_tokens, logprobs=with_logprobs, top_logprobs=body.logprobs or 0)
        sampling = with_json_completion(sampling, constraint, body.complete)
        salt, priority = body.cache_salt or "", body.priority or 0
        prompt_top_logprobs = body.logprobs if body.echo else None
        submissions.append(Submission(ids, sampling, constraint, best_of, tenant, salt, priority, prompt_top_logprobs))
    echoes = [text if body.echo else "" for _, text in prompts]
    options = body.stream_options
    usage = bool(options and options.include_usage)
    return CheckedCompletion(submissions, echoes, n, best_of, body.logprobs, usage, constraint_param)


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
            remaining_context(client.model.context_length, prompt, param)  # first: a body may hold millions of tokens
            if any(not 0 <= token < width for token in prompt):
                raise invalid(f"'{param}' holds a token id that is not from 0 to {width - 1}", param)
            ids, text = prompt, client.tokenizer.decode(prompt)
        else:
            raise invalid("'prompt' mixes token ids with texts or lists", "prompt")
        if not ids:
            raise invalid(f"'{param}' is empty", param)
        prompts.append((ids, text))
    return prompts


async def _complete_response(client: Client, checked: CheckedCompletion, envelope: dict[str, Any]) -> Completion:
    async with submit(client, checked.submissions) as handle:
        prompt_logprobs_of = await handle.prompt_logprobs()
        results = await handle.results()
        choices: list[CompletionChoice] = []
        for at in range(len(checked.submissions)):
            group = results[at * checked.best_of : (at + 1) * checked.best_of]
            for result in _best_by_mean_logprob(group, checked.n):
                writer = _ChoiceWriter(client, checked, at, prompt_logprobs_of[at])
                update = CallUpdate(result.text, result.token_ids, result.logprobs or [], True)
                text, logprobs = writer.write(update)
                choices.append(CompletionChoice(text, len(choices), logprobs, result.finish_reason))
        return Completion(**envelope, choices=choices, usage=msgspec.convert(usage_body(handle.usage()), UsageBody))


def _best_by_mean_logprob(results: list[CallResult], n: int) -> list[CallResult]:
    """The n with the highest mean logprob of their tokens."""
    if len(results) == n:
        return results

    def mean(result: CallResult) -> float:
        values = [entry.logprob for entry in result.logprobs or []]
        return sum(values) / len(values) if values else 0.0

    return sorted(results, key=mean, reverse=True)[:n]


async def _events(state: AppState, checked: CheckedCompletion, envelope: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    envelope = {
        "id": envelope["id"],
        "object": "text_completion",
        "created": envelope["created"],
        "model": envelope["model"],
    }
    usage = {"usage": None} if checked.include_usage else {}
    async with submit(state.client, checked.submissions) as handle:
        told = False
        try:
            prompt_logprobs_of = await handle.prompt_logprobs()
            submissions = range(len(checked.submissions))
            writers = [
                _ChoiceWriter(state.client, checked, at, prompt_logprobs_of[at])
                for at in submissions
                for _ in range(checked.n)
            ]
            num_open = len(handle.calls)
            async with contextlib.aclosing(handle.progress()) as batches:
                async for batch in batches:
                    chunks = []
                    for index, update in batch:
                        num_open -= update.finished
                        text, logprobs = writers[index].write(update)
                        reason = handle.calls[index].result(0).finish_reason if update.finished else None
                        if text or reason or logprobs:
                            choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
                            chunks.append(sse_event({**envelope, "choices": [choice], **usage}))
                    if not num_open:
                        yield FinalEvent(b"".join([*chunks, _final_events(handle, checked, envelope)]))
                    elif chunks:
                        told = True
                        yield b"".join(chunks)
        except Exception as error:
            if not told:
                raise
            answer = as_api_error(error, constraint_param=checked.constraint_param)
            yield sse_event(answer.body())


def _final_events(handle: RequestHandle, checked: CheckedCompletion, envelope: dict[str, Any]) -> bytes:
    done = b"data: [DONE]\n\n"
    return (
        sse_event({**envelope, "choices": [], "usage": usage_body(handle.usage())}) + done
        if checked.include_usage
        else done
    )


class _ChoiceWriter:
    """One answer's texts and logprobs as they come, the echoed prompt first."""

    def __init__(
        self, client: Client, checked: CheckedCompletion, at: int, prompt_logprobs_of: Sequence[TokenLogprob]
    ) -> None:
        self._token_bytes = client.tokenizer.vocabulary.token_bytes
        self._logprob_aligner = LogprobAligner(self._token_bytes) if checked.logprobs is not None else None
        self._top, self._echo, self._offset = checked.logprobs, checked.echoes[at], 0
        self._prompt: list[TokenLogprob] = []
        if checked.logprobs is not None and checked.submissions[at].prompt_logprobs is not None:
            self._prompt = [TokenLogprob(checked.submissions[at].prompt_ids[0], math.nan), *prompt_logprobs_of]

    def write(self, update: CallUpdate) -> tuple[str, TextLogprobs | None]:
        text, self._echo = self._echo + update.text, ""
        if self._logprob_aligner is None:
            return text, None
        entries, self._prompt = self._prompt + self._logprob_aligner.push(update), []
        return text, self._logprobs(entries) if entries or update.finished else None

    def _logprobs(self, entries: list[TokenLogprob]) -> TextLogprobs:
        told = TextLogprobs([], [], [] if self._top else None, [])
        for entry in entries:
            word, is_first = self._token_text(entry.token_id), math.isnan(entry.logprob)
            told.tokens.append(word)
            told.token_logprobs.append(None if is_first else max(entry.logprob, MIN_LOGPROB))
            if told.top_logprobs is not None:
                top = {self._token_text(token): max(value, MIN_LOGPROB) for token, value in entry.top}
                told.top_logprobs.append(None if is_first else top)
            told.text_offset.append(self._offset)
            self._offset += len(word)
        return told

    def _token_text(self, token: int) -> str:
        return self._token_bytes[token].decode("utf-8", "replace")
