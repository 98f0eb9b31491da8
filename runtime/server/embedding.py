"""Texts and token lists as vectors: checked, tokenized, and computed a few at a time, for every protocol that asks.

The texts of one request share the runtime with everybody's calls, so only so many of them are under way at once; the
others wait here. Leaving early, for whatever reason, aborts what still runs.

Knows: sessions, calls, limits. Must not know: protocols' shapes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.errors import DeadlineExceeded
from plait.runtime.sampling import sampling_params
from plait.runtime.server.errors import ApiError, invalid, longest_context
from plait.runtime.server.in_flight import current
from plait.runtime.server.running import LONG_TEXT, longest_token
from plait.runtime.server.state import State

MAX_INPUTS = 2048  # of one request, as OpenAI's
MAX_TOKENS = 300_000  # of all of them together, as OpenAI's; or as many as one context holds
AT_ONCE = 64

Input = str | list[int]


@dataclass(frozen=True)
class Wanted:
    """What is asked for beside the inputs; see `Session.embed`. `timeout_s` is the whole request's."""

    dimensions: int | None = None
    normalize: bool | None = None
    timeout_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


@dataclass
class Computing:
    """One request's sessions and calls, for its record."""

    sessions: list[Session] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def check_can_embed(state: State) -> None:
    """ApiError 400 where the model gives no embeddings, with the reason."""
    model = state.client.model
    if model.embeddings is None:
        text = f"the model '{state.model_name}' has no pooling, so it gives no embeddings: {model.no_embeddings}"
        raise invalid(text, "model", "unsupported_by_model")


def check_dimensions(client: Client, dimensions: int | None) -> None:
    """ApiError 400 for more numbers than a vector has."""
    made = client.model.embeddings
    if made is not None and dimensions is not None and not 1 <= dimensions <= made.size:
        raise invalid(f"'dimensions' must be from 1 to {made.size} for this model, not {dimensions}", "dimensions")


async def token_ids(
    client: Client, inputs: Sequence[Input], param: str, *, cut: bool = False, limit: int | None = None
) -> list[list[int]]:
    """The tokens of each input: a text as the model's own tokenizer has a whole one, behind the prompt of the model's
    files, a list of ids as it is.

    `cut`: what is longer than `limit` (None: the context) loses its end, else it is refused. ApiError names the input,
    as `param[i]`.
    """
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise invalid(f"'{param}' must hold from 1 to {MAX_INPUTS} inputs, not {len(inputs)}", param)
    names = [f"{param}[{i}]" if len(inputs) > 1 else param for i in range(len(inputs))]
    if sum(len(each) for each in inputs if isinstance(each, str)) > LONG_TEXT:
        return await asyncio.to_thread(_all_ids, client, inputs, names, cut, limit)
    return _all_ids(client, inputs, names, cut, limit)


def _all_ids(
    client: Client, inputs: Sequence[Input], names: Sequence[str], cut: bool, limit: int | None
) -> list[list[int]]:
    """One after the other, until there are too many; a text that must be too long is not tokenized."""
    most, longest = max(MAX_TOKENS, client.model.context_length), longest_token(client.tokenizer.vocabulary)
    found: list[list[int]] = []
    total = 0
    for each, name in zip(inputs, names, strict=True):
        least = -(-len(each) // longest) if isinstance(each, str) else len(each)
        ids = _ids(client, each, name, cut, limit or client.model.context_length) if total + least <= most else None
        total += least if ids is None else len(ids)
        if ids is None or total > most:
            raise invalid(f"the inputs have more than {most} tokens in all", name.partition("[")[0])
        found.append(ids)
    return found


def _ids(client: Client, given: Input, name: str, cut: bool, limit: int) -> list[int]:
    tokenizer = client.tokenizer
    if not given:
        raise invalid(f"'{name}' is empty", name)
    if isinstance(given, list):
        if any(not 0 <= token < client.model.vocab_size for token in given):
            raise invalid(f"'{name}' holds a token id that is not from 0 to {client.model.vocab_size - 1}", name)
        ids = given
    elif not cut and len(given) > limit * longest_token(tokenizer.vocabulary):
        text = f"{longest_context(limit)}; '{name}' has {len(given)} characters, which cannot be that few"
        raise ApiError(400, text, param=name, code="context_length_exceeded")
    else:
        ids = client.encode_to_embed(given)
    if len(ids) > limit and cut and len(tokenizer.ending) < limit:
        ending = list(tokenizer.ending)
        ids = ids[: limit - len(ending)] + ending
    if len(ids) > limit:
        text = f"{longest_context(limit)}; '{name}' has {len(ids)}"
        raise ApiError(400, text, param=name, code="context_length_exceeded")
    return ids


async def embedded(client: Client, prompts: Sequence[Sequence[int]], wanted: Wanted) -> list[CallResult]:
    """One result for each prompt, in order. Raises the first failure that is met, and ApiError 503 for want of room."""
    if wanted.timeout_s is not None:
        sampling_params(timeout_s=wanted.timeout_s)  # the one validator of timeouts
    run, began = Computing(), time.monotonic()
    if (record := current()) is not None:
        record.claim(min(AT_ONCE, len(prompts)))
        record.runs.append(run)
    results: list[CallResult] = []
    under_way: deque[tuple[Session, Call]] = deque()
    try:
        for prompt in prompts:
            if len(under_way) == AT_ONCE:
                results.append(await _next(under_way))
            session = client.open_session(tenant=wanted.tenant, cache_salt=wanted.cache_salt, priority=wanted.priority)
            run.sessions.append(session)
            session.append_tokens(prompt)
            left = _left(wanted.timeout_s, began)
            call = session.embed(wanted.dimensions, normalize=wanted.normalize, timeout_s=left)
            run.calls.append(call)
            under_way.append((session, call))
        while under_way:
            results.append(await _next(under_way))
    finally:
        for session in run.sessions:
            session.abort()  # those that are closed stay as they are
    return results


async def _next(under_way: deque[tuple[Session, Call]]) -> CallResult:
    session, call = under_way[0]
    result = await call.aresult()
    session.close()
    under_way.popleft()
    return result


def _left(timeout_s: float | None, began: float) -> float | None:
    """Seconds that are left of the request's own timeout."""
    if timeout_s is None:
        return None
    left = began + timeout_s - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"the request took longer than its timeout of {timeout_s:g} s")
    return left
