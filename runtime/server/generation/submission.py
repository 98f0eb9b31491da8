"""Runs checked requests as sessions and calls of the runtime.

A `Submission` is one prompt with its n answers: the prompt goes into one session, which is forked n times, so it is
computed once. Usage: `async with submit(client, submissions) as handle:`; leaving the block early aborts running calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec
from msgspec import UNSET, UnsetType

from plait.constrained.specs import Spec
from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.call_reports import ChoiceScores, TokenLogprob, Usage, decode_logprobs
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.client.stream import CallUpdate, stream_updates
from plait.runtime.errors import ContextOverflow
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.errors import context_limit_message
from plait.runtime.server.in_flight import RequestRecord, RequestSize, current_request

MAX_UNREAD_BYTES = 5 << 17  # of a stream whose client does not read, beside the buffers of its connection
TOKENIZE_IN_THREAD_CHARS = 5_000  # tokenizing a longer text would block the event loop for milliseconds
MAX_TOKENS_OF_TEXT = 500_000  # as many as a body may list; their ids are made in one call that holds the lock
YIELD_AFTER_CHARS = 100  # the event loop serves others after a text of this length: there may be many


@dataclass(frozen=True)
class Submission:
    """One prompt, how to sample its answers, and how many.

    prompt_ids: all token ids, BOS included. n: the number of answers. tenant, cache_salt: select the prefix cache.
    priority: the rank among waiting calls. prompt_logprobs: how many top tokens to return at each position of the
    prompt (None: no logprobs of the prompt). plain_bytes: of text at the end of the prompt that token healing may take
    back.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    constraint: Spec | None = None
    n: int = 1
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    prompt_logprobs: int | None = None
    plain_bytes: int = 0


@dataclass
class RequestHandle:
    """The sessions and calls of some submissions.

    `calls` holds the answers of the first submission, then those of the next. The lists `num_calls_per_request` and
    `prompt_scoring_calls` have one entry per submission.
    """

    calls: list[Call] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    num_calls_per_request: list[int] = field(default_factory=list)
    prompt_scoring_calls: list[Call | None] = field(default_factory=list)  # the calls that compute prompt logprobs
    request_warnings: Sequence[str] = ()
    before_reading: Callable[[], None] | None = None  # see `RequestRecord`
    _given_warnings: set[str] = field(default_factory=set)

    def abort(self) -> None:
        """Ends all sessions at once. Every call that still runs fails."""
        for session in self.sessions:
            session.abort()

    async def results(self) -> list[CallResult]:
        """Waits for all calls and returns their results in order. Raises the first failure as soon as it occurs."""
        async for batch in stream_updates(self.calls, only_final=True):
            for index, _ in batch:
                self.calls[index].result(0)
        await self._prepare_reading()
        return [call.result(0) for call in self.calls]

    async def prompt_logprobs(self) -> list[list[TokenLogprob]]:
        """Returns, per submission, the logprobs of all prompt tokens but the first; [] if not requested."""
        scores = [None if call is None else (await call.aresult()).choice for call in self.prompt_scoring_calls]
        return [
            [] if found is None else await asyncio.to_thread(_as_token_logprobs, submission.prompt_ids[1:], found)
            for submission, found in zip(self.submissions, scores, strict=True)
        ]

    async def progress(self, raise_on_failure: bool = True) -> AsyncGenerator[list[tuple[int, CallUpdate]], None]:
        """Streams the updates of all calls as (index of the call, update).

        Raises the failure of a call that failed, or without `raise_on_failure` leaves that to the call's `result()`.

        The logprobs are in the updates only, and a call is aborted if its updates are not taken; see `stream_updates`.
        """
        updates = stream_updates(self.calls, raise_on_failure=raise_on_failure, max_unread_bytes=MAX_UNREAD_BYTES)
        async with contextlib.aclosing(updates):
            async for batch in updates:
                await self._prepare_reading()
                yield batch

    async def _prepare_reading(self) -> None:
        if self.before_reading is not None:
            prepare, self.before_reading = self.before_reading, None
            await asyncio.to_thread(prepare)

    def warnings(self, calls: Sequence[Call] | None = None, more: Sequence[str] = ()) -> list[str] | UnsetType:
        """Returns the warnings of the request's fields and of `calls`, which must be done, by default of all calls; and
        `more`.

        Each warning is returned once: the events of a stream have those that no earlier one has. See
        `request_warnings.py` and `Grammar.warnings`.
        """
        of_calls = [text for call in (self.calls if calls is None else calls) for text in call.result(0).warnings]
        texts = [text for text in (*self.request_warnings, *of_calls, *more) if text not in self._given_warnings]
        self._given_warnings.update(texts)
        return list(dict.fromkeys(texts)) or UNSET

    def usage(self) -> Usage:
        """Returns the usage of all calls, which must be done. A prompt counts once, however many answers it has."""
        prompt = cached = completion = reasoning = start = 0
        for submission, count in zip(self.submissions, self.num_calls_per_request, strict=True):
            usages = [call.result(0).usage for call in self.calls[start : start + count]]
            start += count
            prompt += usages[0].prompt_tokens
            if submission.prompt_logprobs is None:  # otherwise the whole prompt was computed for its logprobs
                cached += min(usage.cached_tokens for usage in usages)
            completion += sum(usage.completion_tokens for usage in usages)
            reasoning += sum(usage.reasoning_tokens for usage in usages)
        return Usage(
            prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion, reasoning_tokens=reasoning
        )


@contextlib.asynccontextmanager
async def submit(client: Client, submissions: Sequence[Submission]) -> AsyncIterator[RequestHandle]:
    """Starts all submissions. On exit closes their sessions, or aborts them if a call is still running."""
    handle = RequestHandle()
    if (record := current_request()) is not None:
        record.reserve_calls(_size(submissions))
        record.handles.append(handle)
        handle.request_warnings, handle.before_reading = list(record.warnings), record.before_reading
    try:
        for submission in submissions:
            _start(client, submission if record is None else _with_time_left(submission, record), handle, record)
            if len(submissions) > 1:
                await asyncio.sleep(0)
        yield handle
    finally:
        finished = all(call.done() for call in (*handle.calls, *handle.prompt_scoring_calls) if call is not None)
        for session in handle.sessions:
            session.close() if finished else session.abort()


def _size(submissions: Sequence[Submission]) -> RequestSize:
    """How the submissions count against the limits."""
    num_rows = sum(submission.n * submission.sampling.max_rows for submission in submissions)
    has_particles = any(submission.sampling.particles for submission in submissions)
    return RequestSize(num_rows, num_rows if has_particles else 1)


def _with_time_left(submission: Submission, record: RequestRecord) -> Submission:
    """Returns the submission with what is left of its timeout if the request is run again."""
    timeout_s = record.limit_timeout(submission.sampling.timeout_s)
    if timeout_s == submission.sampling.timeout_s:
        return submission
    return replace(submission, sampling=msgspec.structs.replace(submission.sampling, timeout_s=timeout_s))


def _start(client: Client, submission: Submission, handle: RequestHandle, record: RequestRecord | None) -> None:
    session = open_session(client, submission.tenant, submission.cache_salt, submission.priority, record)
    handle.sessions.append(session)
    handle.submissions.append(submission)
    handle.prompt_scoring_calls.append(_append_prompt(session, submission))
    handle.num_calls_per_request.append(submission.n)
    if submission.n == 1:
        handle.calls.append(session.generate(submission.sampling, submission.constraint))
        return
    children = session.fork(submission.n)
    handle.sessions += children
    for index, child in enumerate(children):
        handle.calls.append(child.generate(submission.sampling.for_sample(index), submission.constraint))


def open_session(client: Client, tenant: str, cache_salt: str, priority: int, record: RequestRecord | None) -> Session:
    """Opens a session for the request `record`: of its adapter, and behind all others for a line of a batch."""
    background, adapter = (False, "") if record is None else (record.is_background, record.adapter)
    return client.open_session(
        tenant=tenant, cache_salt=cache_salt, priority=priority, background=background, adapter=adapter
    )


@lru_cache(maxsize=8)
def max_token_bytes(vocabulary: Vocabulary) -> int:
    """Returns the bytes of the longest token. A text of n characters has at least n divided by this many tokens."""
    return max(map(len, vocabulary.token_bytes))


def check_fits_context(client: Client, num_chars: int) -> None:
    """Raises ContextOverflow for a text that exceeds the context however it is tokenized."""
    if num_chars > client.model.context_length * max_token_bytes(client.tokenizer.vocabulary):
        limit = context_limit_message(client.model.context_length)
        raise ContextOverflow(f"{limit}; the prompt has {num_chars} characters, which are more tokens than that")


def _append_prompt(session: Session, submission: Submission) -> Call | None:
    """Appends the prompt to the session. Returns the call that computes its logprobs, if they are requested."""
    if submission.prompt_logprobs is None or len(submission.prompt_ids) < 2:
        session.append_tokens(submission.prompt_ids, submission.plain_bytes)
        return None
    session.append_tokens(submission.prompt_ids[:1])
    timeout_s, plain_bytes = submission.sampling.timeout_s, submission.plain_bytes
    return session.score_tokens(
        submission.prompt_ids[1:], submission.prompt_logprobs, timeout_s, plain_bytes=plain_bytes
    )


def _as_token_logprobs(token_ids: Sequence[int], scores: ChoiceScores) -> list[TokenLogprob]:
    if scores.top_logprobs is not None:
        return decode_logprobs(scores.top_logprobs[0])
    return [
        TokenLogprob(token_id, logprob) for token_id, logprob in zip(token_ids, scores.token_logprobs[0], strict=True)
    ]


async def tokenize(client: Client, parts: Sequence[tuple[str, bool]]) -> list[int]:
    """Returns the token ids of a prompt, with BOS if the model uses it.

    `parts`: (text, whether it may contain control tokens). Raises ContextOverflow, mostly before tokenizing, for a text
    that cannot fit.
    """
    tokenizer, num_chars = client.tokenizer, sum(len(text) for text, _ in parts)
    if num_chars > TOKENIZE_IN_THREAD_CHARS:
        check_fits_context(client, num_chars)
        max_tokens = max(client.model.context_length, MAX_TOKENS_OF_TEXT)
        ids = await asyncio.to_thread(tokenizer.encode, parts, at_start=True, max_tokens=max_tokens)
    else:
        ids = tokenizer.encode(parts, at_start=True)
        if num_chars > YIELD_AFTER_CHARS:
            await asyncio.sleep(0)
    return prepend_bos(client, ids)


def prepend_bos(client: Client, ids: list[int]) -> list[int]:
    """Inserts BOS before `ids`, in place, if the model uses it and it is not there. Returns `ids`."""
    tokenizer = client.tokenizer
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids
