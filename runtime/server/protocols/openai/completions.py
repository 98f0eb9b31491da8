"""`/v1/completions`: completes one or several prompts, given as text or token ids, with `n` choices each.

Source: https://platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from plait.runtime.call_reports import TokenLogprob
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.server.app_state import request_id, tenant_of, use_model_in_turn
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import invalid
from plait.runtime.server.generation.cache_miss import CacheMissReport
from plait.runtime.server.generation.json_completion import with_json_completion
from plait.runtime.server.generation.logprobs import MIN_LOGPROB, LogprobAligner, token_text
from plait.runtime.server.generation.raw_prompt import parses_special
from plait.runtime.server.generation.sampling_fields import read_sampling_params
from plait.runtime.server.generation.submission import RequestHandle, Submission
from plait.runtime.server.generation.threads import LARGE_TOKENS, run_in_thread_if
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import encoded
from plait.runtime.server.protocols.answer import Batch, answer, num_tokens
from plait.runtime.server.protocols.openai.completion_prompts import Prompts, num_prompts, read_prompts
from plait.runtime.server.protocols.openai.fields import (
    ChunkWriter,
    FinishReason,
    ResponseHead,
    SamplingRequest,
    UsageBody,
    check_stream_options,
    constraint_of,
)
from plait.runtime.server.protocols.shared import (
    ImportanceWeight,
    checked_count,
    extensions,
    remaining_context,
    timeout_of,
)

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
MAX_LOGPROBS = 20
MAX_BEST_OF = 20


class CompletionRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """`prompt`: a text, a list of texts, a list of token ids, a list of parts of one text, or a list of such lists.

    `parse_special`: whether names of control tokens in texts become control tokens; by default as the server is set.
    `suffix`: a text behind the answer, for models that fill in the middle.
    """

    field_table: ClassVar[str] = "completions"
    prompt: Prompts | None = None
    parse_special: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class TextLogprobs(msgspec.Struct):
    """For each token: its text, logprob, most likely tokens, and offset in the text in characters.

    The first token of an echoed prompt has no logprob, so its logprob and its most likely tokens are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """`weight` and `cache_miss` are extensions; in a stream, the last chunk of a choice has them."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    weight: ImportanceWeight | UnsetType = UNSET
    cache_miss: CacheMissReport | UnsetType = UNSET


class Completion(msgspec.Struct):
    """OpenAI's completion object, or one chunk of a stream.

    `usage`: in a stream with `include_usage`, it is null in all chunks but the last, which has no choices.
    """

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    warnings: list[str] | UnsetType = UNSET


@dataclass(frozen=True)
class CheckedCompletion:
    """A checked request. `submissions` and `echoes` have one entry per prompt.

    An echo is the text that each choice begins with: the prompt, or "" without `echo`.
    """

    head: ResponseHead
    submissions: list[Submission]
    echoes: list[str]
    n: int
    best_of: int
    logprobs: int | None
    includes_usage: bool
    constraint_param: str | None


@router.post("/v1/completions", **documented(CompletionRequest, Completion, stream=True))
async def create_completion(request: Request) -> Response:
    """Completes texts. Streams if `stream` is true."""
    body = await read_json(request, CompletionRequest)
    model = await use_model_in_turn(request, body.model, timeout_of(body))
    checked = await _check(body, model, tenant_of(request), "cmpl-" + request_id(request)[4:])
    return await answer(
        request,
        model,
        checked.submissions,
        lambda handle: _CompletionWriter(model.client, checked, handle),
        stream=bool(body.stream),
        constraint_param=checked.constraint_param,
    )


# -- the request ----------------------------------------------------------------------------------


async def _check(body: CompletionRequest, model: ServedModel, tenant: str, completion_id: str) -> CheckedCompletion:
    n, best_of = _checked_counts(body, model.settings.max_choices)
    constraint, constraint_param = constraint_of(body)
    if num_prompts(body.prompt) * best_of > model.settings.max_choices:  # checked before the prompts are tokenized
        raise invalid(f"prompts times choices must not exceed {model.settings.max_choices}", "prompt")
    parse_special = parses_special(model.settings, body.parse_special)
    prompts = await read_prompts(body.prompt, model.client, parse_special, body.suffix)
    with_logprobs = body.logprobs is not None or best_of > n
    submissions = []
    for index, prompt in enumerate(prompts):
        if index:
            await asyncio.sleep(0)
        context_left = remaining_context(model.client.model.context_length, prompt.ids, "prompt")
        sampling = read_sampling_params(
            body,
            "openai",
            max_tokens=min(DEFAULT_MAX_TOKENS, context_left) if body.max_tokens is None else body.max_tokens,
            logprobs=with_logprobs,
            top_logprobs=body.logprobs or 0,
        )
        sampling = with_json_completion(sampling, constraint, body.complete)
        salt, priority = body.cache_salt or "", body.priority or 0
        prompt_logprobs = body.logprobs if body.echo else None
        more = (salt, priority, prompt_logprobs, prompt.plain_bytes)
        submissions.append(Submission(prompt.ids, sampling, constraint, best_of, tenant, *more))
    head = ResponseHead(completion_id, int(time.time()), body.model)
    echoes = [prompt.text if body.echo else "" for prompt in prompts]
    return CheckedCompletion(
        head, submissions, echoes, n, best_of, body.logprobs, body.includes_usage, constraint_param
    )


def _checked_counts(body: CompletionRequest, max_choices: int) -> tuple[int, int]:
    """Returns n and best_of. Raises ApiError if they, or other fields that need no context, are invalid."""
    if body.suffix and body.echo:
        raise invalid("'suffix' and 'echo' cannot both be given", "echo")
    n = checked_count(body.n, max_choices)
    best_of = checked_count(body.best_of, MAX_BEST_OF, name="best_of") if body.best_of is not None else n
    if best_of < n:
        raise invalid("'best_of' must not be less than 'n'", "best_of")
    if best_of > n and body.stream:
        raise invalid("'best_of' above 'n' cannot be streamed", "best_of")
    check_stream_options(body)
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise invalid(f"'logprobs' must be from 0 to {MAX_LOGPROBS}", "logprobs")
    return n, best_of


# -- the answer -----------------------------------------------------------------------------------


def _best_by_mean_logprob(results: Sequence[CallResult], n: int) -> Sequence[CallResult]:
    """Returns the n results with the highest mean logprob of their tokens."""
    if len(results) == n:
        return results

    def mean_logprob(result: CallResult) -> float:
        values = [entry.logprob for entry in result.logprobs or []]
        return sum(values) / len(values) if values else 0.0

    return sorted(results, key=mean_logprob, reverse=True)[:n]


class _CompletionWriter(ChunkWriter):
    """All choices, and the usage: in a stream as a last chunk, if it was requested."""

    kind = Completion

    def __init__(self, client: Client, checked: CheckedCompletion, handle: RequestHandle) -> None:
        super().__init__(checked.head, checked.includes_usage, handle)
        self._client, self._checked = client, checked
        self._writers: list[_ChoiceWriter] = []

    async def complete(self, handle: RequestHandle) -> Completion:
        prompt_logprobs, results = await handle.prompt_logprobs(), await handle.results()
        with_logprobs = self._checked.logprobs is not None or self._checked.best_of > self._checked.n
        is_large = with_logprobs and sum(map(len, prompt_logprobs)) + num_tokens(results) > LARGE_TOKENS
        return await run_in_thread_if(is_large, self.body, results, prompt_logprobs)

    def body(self, results: Sequence[CallResult], prompt_logprobs: Sequence[list[TokenLogprob]] = ()) -> Completion:
        checked, choices, waiting = self._checked, list[CompletionChoice](), list(prompt_logprobs)
        for prompt, submission in enumerate(checked.submissions):
            candidates = results[prompt * checked.best_of : (prompt + 1) * checked.best_of]
            entries, waiting[prompt] = waiting[prompt], []  # freed prompt by prompt
            for result in _best_by_mean_logprob(candidates, checked.n):
                text, logprobs = _ChoiceWriter(self._client, checked, prompt, entries).write_result(result)
                more = extensions(self._client, result, submission.prompt_ids)
                choices.append(CompletionChoice(text, len(choices), logprobs, result.finish_reason, *more))
        usage = UsageBody.of(self.handle.usage())
        return Completion(*self.head, choices, usage, warnings=self.handle.warnings())

    async def start(self) -> None:
        prompt_logprobs = await self.handle.prompt_logprobs()
        for prompt in range(len(self._checked.submissions)):
            for _ in range(self._checked.n):
                self._writers.append(_ChoiceWriter(self._client, self._checked, prompt, prompt_logprobs[prompt]))

    async def write_before(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        """The chunk of each echo with logprobs: they may be long, and as many as choices."""
        for index, _ in batch:
            writer = self._writers[index]
            if writer.num_prompt_entries:
                is_large = writer.num_prompt_entries > LARGE_TOKENS
                yield await run_in_thread_if(is_large, self._echo_chunk, writer, index)

    def _echo_chunk(self, writer: _ChoiceWriter, index: int) -> bytes:
        text, logprobs = writer.take_echo()
        return self.chunk([CompletionChoice(text, index, logprobs, None)])

    def write(self, batch: Batch) -> bytes:
        chunks = []
        for index, update in batch:
            text, logprobs = self._writers[index].write(update)
            choice = CompletionChoice(text, index, logprobs, None)
            warnings: list[str] | UnsetType = UNSET
            if update.finished:
                call, submission = self.handle.calls[index], self._checked.submissions[index // self._checked.n]
                choice.finish_reason, warnings = call.result(0).finish_reason, self.handle.warnings([call])
                choice.weight, choice.cache_miss = extensions(self._client, call.result(0), submission.prompt_ids)
            if text or choice.finish_reason or logprobs:
                chunks.append(self.chunk([choice], warnings))
        return b"".join(chunks)


class _ChoiceWriter:
    """Converts the updates of one choice to texts and logprobs. The first text begins with the echoed prompt."""

    def __init__(
        self, client: Client, checked: CheckedCompletion, prompt: int, prompt_logprobs: Sequence[TokenLogprob]
    ) -> None:
        submission = checked.submissions[prompt]
        self._client = client
        token_bytes = client.tokenizer.vocabulary.token_bytes
        self._logprob_aligner = LogprobAligner(token_bytes) if checked.logprobs is not None else None
        self._with_top = bool(checked.logprobs)
        self._echo, self._offset = checked.echoes[prompt], 0
        self._prompt_entries: list[TokenLogprob] = []
        if checked.logprobs is not None and submission.prompt_logprobs is not None:
            self._prompt_entries = [TokenLogprob(submission.prompt_ids[0], math.nan), *prompt_logprobs]

    @property
    def num_prompt_entries(self) -> int:
        """The number of logprobs of the echo."""
        return len(self._prompt_entries)

    def take_echo(self) -> tuple[str, TextLogprobs]:
        """The echo and its logprobs, which `write` then leaves out."""
        text, entries = self._echo, self._prompt_entries
        self._echo, self._prompt_entries = "", []
        return text, self._logprobs(entries)

    def write(self, update: CallUpdate) -> tuple[str, TextLogprobs | None]:
        text, self._echo = self._echo + update.text, ""
        if self._logprob_aligner is None:
            return text, None
        entries, self._prompt_entries = self._prompt_entries + self._logprob_aligner.push(update), []
        return text, self._logprobs(entries) if entries or update.finished else None

    def write_result(self, result: CallResult) -> tuple[str, TextLogprobs | None]:
        """Converts a finished call as one update."""
        return self.write(CallUpdate(result.text, result.token_ids, result.encoded_logprobs or (), True))

    def _logprobs(self, entries: list[TokenLogprob]) -> TextLogprobs:
        logprobs = TextLogprobs([], [], [] if self._with_top else None, [])
        for entry in entries:
            text, is_first = self._token_text(entry.token_id), math.isnan(entry.logprob)
            logprobs.tokens.append(text)
            logprobs.token_logprobs.append(None if is_first else max(entry.logprob, MIN_LOGPROB))
            if logprobs.top_logprobs is not None:
                top = {self._token_text(token): max(value, MIN_LOGPROB) for token, value in entry.top}
                logprobs.top_logprobs.append(None if is_first else encoded(top))
            logprobs.text_offset.append(self._offset)
            self._offset += len(text)
        return logprobs

    def _token_text(self, token: int) -> str:
        return token_text(self._client, token)
