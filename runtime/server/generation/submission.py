"""A checked request as sessions and calls: opened, followed, and ended, whatever happens.

One `Submission` is one prompt and its n answers: the prompt goes into one session, which is forked n times, so it is
computed once. Used as `async with running(client, works) as run:`; leaving the block early aborts what still runs.

Knows: sessions, calls, sampling. Must not know: HTTP, chat templates, protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from plait.constrained.specs import Spec
from plait.constrained.vocabulary import Vocabulary
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.client.stream import CallUpdate, stream_updates
from plait.runtime.errors import ContextOverflow
from plait.runtime.messages import ChoiceScores, TokenLogprob, Usage
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.errors import context_limit_message
from plait.runtime.server.in_flight import current_request

TOKENIZE_IN_THREAD_CHARS = 20_000  # characters; tokenizing more would hold the event loop up for milliseconds


@dataclass(frozen=True)
class Submission:
    """One prompt (token ids, whole, BOS included), how to go on from it, and how many times.

    `tenant` and `cache_salt` name the prefix cache, `priority` the rank among waiting calls. `prompt_logprobs`: how
    many likeliest tokens are wanted at each place of the prompt, where its logprobs are wanted at all.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    constraint: Spec | None = None
    n: int = 1
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    prompt_logprobs: int | None = None


@dataclass
class RequestHandle:
    """The calls of some works; `calls[i]` belongs to `submissions[i // n]` when all have the same n."""

    calls: list[Call] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    num_calls_per_request: list[int] = field(default_factory=list)  # of calls, per work
    prompt_scoring_calls: list[Call | None] = field(default_factory=list)  # per work: the call that scores its prompt

    async def results(self) -> list[CallResult]:
        """Every call's result, in order. Raises the first failure as soon as it is known."""
        async for batch in stream_updates(self.calls, only_final=True):
            for index, _ in batch:
                self.calls[index].result(0)
        return [call.result(0) for call in self.calls]

    async def prompt_logprobs(self) -> list[list[TokenLogprob]]:
        """Per work, the logprobs of its prompt's tokens but the first; none where they were not asked for."""
        return [
            [] if call is None else _as_token_logprobs(submission.prompt_ids[1:], (await call.aresult()).choice)
            for submission, call in zip(self.submissions, self.prompt_scoring_calls, strict=True)
        ]

    def progress(self) -> AsyncGenerator[list[tuple[int, CallUpdate]], None]:
        """`stream_updates` of all calls; raises a call's failure when it comes to its end."""
        return stream_updates(self.calls, raise_on_failure=True)

    def usage(self) -> Usage:
        """Of all calls that are done; a prompt counts once, however many answers it has."""
        prompt = cached = completion = at = 0
        for index, count in enumerate(self.num_calls_per_request):
            usages = [call.result(0).usage for call in self.calls[at : at + count]]
            at += count
            prompt += usages[0].prompt_tokens
            if self.submissions[index].prompt_logprobs is None:  # else all of it was computed
                cached += min(usage.cached_tokens for usage in usages)
            completion += sum(usage.completion_tokens for usage in usages)
        return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


@contextlib.asynccontextmanager
async def submit(client: Client, submissions: Sequence[Submission]) -> AsyncIterator[RequestHandle]:
    """Starts every work; on the way out closes its sessions, or aborts those whose calls are not done."""
    handle = RequestHandle()
    if (record := current_request()) is not None:
        record.reserve_calls(sum(submission.n for submission in submissions))
        record.handles.append(handle)
    try:
        for submission in submissions:
            _start(client, submission, handle)
        yield handle
    finally:
        finished = all(call.done() for call in (*handle.calls, *handle.prompt_scoring_calls) if call is not None)
        for session in handle.sessions:
            session.close() if finished else session.abort()


def _start(client: Client, submission: Submission, handle: RequestHandle) -> None:
    session = client.open_session(
        tenant=submission.tenant, cache_salt=submission.cache_salt, priority=submission.priority
    )
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


@lru_cache(maxsize=8)
def max_token_bytes(vocabulary: Vocabulary) -> int:
    """Bytes of the longest token: a text of more characters is more than one."""
    return max(map(len, vocabulary.token_bytes))


def check_fits_context(client: Client, length: int) -> None:
    """ContextOverflow where so many characters are more tokens than the context holds, however they are tokenized."""
    if length > client.model.context_length * max_token_bytes(client.tokenizer.vocabulary):
        limit = context_limit_message(client.model.context_length)
        raise ContextOverflow(f"{limit}; the prompt has {length} characters, which cannot be that few")


def _append_prompt(session: Session, submission: Submission) -> Call | None:
    """The prompt becomes text; the call that scores it, where it is scored."""
    if submission.prompt_logprobs is None or len(submission.prompt_ids) < 2:
        session.append_tokens(submission.prompt_ids)
        return None
    session.append_tokens(submission.prompt_ids[:1])
    return session.score_tokens(submission.prompt_ids[1:], submission.prompt_logprobs, submission.sampling.timeout_s)


def _as_token_logprobs(token_ids: Sequence[int], scores: ChoiceScores | None) -> list[TokenLogprob]:
    assert scores is not None
    tops = scores.top_logprobs[0] if scores.top_logprobs else [[]] * len(token_ids)
    triples = zip(token_ids, scores.token_logprobs[0], tops, strict=True)
    return [TokenLogprob(token, logprob, top) for token, logprob, top in triples]


async def tokenize(client: Client, parts: Sequence[tuple[str, bool]]) -> list[int]:
    """The ids of a whole prompt of (text, is the template's own) parts, BOS included if the model wants one.

    Raises ContextOverflow, before any work, for a text that cannot fit however it is tokenized.
    """
    tokenizer, length = client.tokenizer, sum(len(text) for text, _ in parts)
    if length > TOKENIZE_IN_THREAD_CHARS:
        check_fits_context(client, length)
        ids = await asyncio.to_thread(tokenizer.encode, parts, at_start=True)
    else:
        ids = tokenizer.encode(parts, at_start=True)
    return prepend_bos(client, ids)


def prepend_bos(client: Client, ids: list[int]) -> list[int]:
    """The same list, behind the token that the model wants a text to begin with."""
    tokenizer = client.tokenizer
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids
