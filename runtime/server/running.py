"""A checked request as sessions and calls: opened, followed, and ended, whatever happens.

One `Work` is one prompt and its n answers: the prompt goes into one session, which is forked n times, so it is
computed once. Used as `async with running(client, works) as run:`; leaving the block early aborts what still runs.

Knows: sessions, calls, sampling. Must not know: HTTP, chat templates, protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from plait.constrained.specs import Spec
from plait.constrained.vocabulary import Vocabulary
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.following import Progress, follow
from plait.runtime.client.session import Session
from plait.runtime.errors import ContextOverflow
from plait.runtime.messages import ChoiceScores, TokenLogprob, Usage
from plait.runtime.sampling import SamplingParams
from plait.runtime.server.errors import longest_context
from plait.runtime.server.in_flight import current

LONG_TEXT = 20_000  # characters; tokenizing more would hold the event loop up for milliseconds


@dataclass(frozen=True)
class Work:
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
class Run:
    """The calls of some works; `calls[i]` belongs to `works[i // n]` when all have the same n."""

    calls: list[Call] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # of calls, per work
    scored: list[Call | None] = field(default_factory=list)  # per work: the call that scores its prompt

    async def results(self) -> list[CallResult]:
        """Every call's result, in order. Raises the first failure as soon as it is known."""
        async for batch in follow(self.calls, only_ends=True):
            for index, _ in batch:
                self.calls[index].result(0)
        return [call.result(0) for call in self.calls]

    async def prompt_logprobs(self) -> list[list[TokenLogprob]]:
        """Per work, the logprobs of its prompt's tokens but the first; none where they were not asked for."""
        return [
            [] if call is None else _entries(work.prompt_ids[1:], (await call.aresult()).choice)
            for work, call in zip(self.works, self.scored, strict=True)
        ]

    def progress(self) -> AsyncGenerator[list[tuple[int, Progress]], None]:
        """`follow` of all calls; raises a call's failure when it comes to its end."""
        return follow(self.calls, raises=True)

    def usage(self) -> Usage:
        """Of all calls that are done; a prompt counts once, however many answers it has."""
        prompt = cached = completion = at = 0
        for index, count in enumerate(self.counts):
            usages = [call.result(0).usage for call in self.calls[at : at + count]]
            at += count
            prompt += usages[0].prompt_tokens
            if self.works[index].prompt_logprobs is None:  # else all of it was computed
                cached += min(usage.cached_tokens for usage in usages)
            completion += sum(usage.completion_tokens for usage in usages)
        return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


@contextlib.asynccontextmanager
async def running(client: Client, works: Sequence[Work]) -> AsyncIterator[Run]:
    """Starts every work; on the way out closes its sessions, or aborts those whose calls are not done."""
    run = Run()
    if (record := current()) is not None:
        record.claim(sum(work.n for work in works))
        record.runs.append(run)
    try:
        for work in works:
            _start(client, work, run)
        yield run
    finally:
        finished = all(call.done() for call in (*run.calls, *run.scored) if call is not None)
        for session in run.sessions:
            session.close() if finished else session.abort()


def _start(client: Client, work: Work, run: Run) -> None:
    session = client.open_session(tenant=work.tenant, cache_salt=work.cache_salt, priority=work.priority)
    run.sessions.append(session)
    run.works.append(work)
    run.scored.append(_append_prompt(session, work))
    run.counts.append(work.n)
    if work.n == 1:
        run.calls.append(session.generate(work.sampling, work.constraint))
        return
    children = session.fork(work.n)
    run.sessions += children
    for index, child in enumerate(children):
        run.calls.append(child.generate(_seeded(work.sampling, index), work.constraint))


@lru_cache(maxsize=8)
def longest_token(vocabulary: Vocabulary) -> int:
    """Bytes of the longest token: a text of more characters is more than one."""
    return max(map(len, vocabulary.token_bytes))


def refuse_too_long(client: Client, length: int) -> None:
    """ContextOverflow where so many characters are more tokens than the context holds, however they are tokenized."""
    if length > client.model.context_length * longest_token(client.tokenizer.vocabulary):
        limit = longest_context(client.model.context_length)
        raise ContextOverflow(f"{limit}; the prompt has {length} characters, which cannot be that few")


def _append_prompt(session: Session, work: Work) -> Call | None:
    """The prompt becomes text; the call that scores it, where it is scored."""
    if work.prompt_logprobs is None or len(work.prompt_ids) < 2:
        session.append_tokens(work.prompt_ids)
        return None
    session.append_tokens(work.prompt_ids[:1])
    return session.score_tokens(work.prompt_ids[1:], work.prompt_logprobs, work.sampling.timeout_s)


def _entries(token_ids: Sequence[int], scores: ChoiceScores | None) -> list[TokenLogprob]:
    assert scores is not None
    tops = scores.top_logprobs[0] if scores.top_logprobs else [[]] * len(token_ids)
    triples = zip(token_ids, scores.token_logprobs[0], tops, strict=True)
    return [TokenLogprob(token, logprob, top) for token, logprob, top in triples]


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The n answers of one seed differ, and are the same answers each time."""
    if not index or sampling.seed is None:
        return sampling
    seed = sampling.seed + index
    return msgspec.structs.replace(sampling, seed=seed if seed < 2**63 else seed - 2**64)


async def tokenize(client: Client, parts: Sequence[tuple[str, bool]]) -> list[int]:
    """The ids of a whole prompt of (text, is the template's own) parts, BOS included if the model wants one.

    Raises ContextOverflow, before any work, for a text that cannot fit however it is tokenized.
    """
    tokenizer, length = client.tokenizer, sum(len(text) for text, _ in parts)
    if length > LONG_TEXT:
        refuse_too_long(client, length)
        ids = await asyncio.to_thread(tokenizer.encode, parts, at_start=True)
    else:
        ids = tokenizer.encode(parts, at_start=True)
    return with_bos(client, ids)


def with_bos(client: Client, ids: list[int]) -> list[int]:
    """The same list, behind the token that the model wants a text to begin with."""
    tokenizer = client.tokenizer
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids
