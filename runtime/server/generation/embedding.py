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
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.app_state import AppState
from plait.runtime.server.errors import ApiError, context_limit_message, invalid
from plait.runtime.server.generation.submission import TOKENIZE_IN_THREAD_CHARS, max_token_bytes
from plait.runtime.server.in_flight import current_request

MAX_INPUTS = 2048  # of one request, as OpenAI's
MAX_TOKENS = 300_000  # of all of them together, as OpenAI's; or as many as one context holds
MAX_CONCURRENT_INPUTS = 64

EmbeddingInput = str | list[int]


@dataclass(frozen=True)
class EmbeddingOptions:
    """What is asked for beside the inputs; see `Session.embed`. `timeout_s` is the whole request's."""

    dimensions: int | None = None
    normalize: bool | None = None
    timeout_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


@dataclass
class EmbeddingHandle:
    """One request's sessions and calls, for its record."""

    sessions: list[Session] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def check_can_embed(state: AppState) -> None:
    """ApiError 400 where the model gives no embeddings, with the reason."""
    model = state.client.model
    if model.embeddings is None:
        text = f"the model '{state.model_name}' has no pooling, so it gives no embeddings: {model.no_embeddings_reason}"
        raise invalid(text, "model", "unsupported_by_model")


def check_dimensions(client: Client, dimensions: int | None) -> None:
    """ApiError 400 for more numbers than a vector has."""
    made = client.model.embeddings
    if made is not None and dimensions is not None and not 1 <= dimensions <= made.size:
        raise invalid(f"'dimensions' must be from 1 to {made.size} for this model, not {dimensions}", "dimensions")


async def tokenize_inputs(
    client: Client, inputs: Sequence[EmbeddingInput], param: str, *, truncate: bool = False, limit: int | None = None
) -> list[list[int]]:
    """The tokens of each input: a text as the model's own tokenizer has a whole one, behind the prompt of the model's
    files, a list of ids as it is.

    `truncate`: what is longer than `limit` (None: the context) loses its end, else it is refused. ApiError names the input,
    as `param[i]`.
    """
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise invalid(f"'{param}' must hold from 1 to {MAX_INPUTS} inputs, not {len(inputs)}", param)
    names = [f"{param}[{i}]" if len(inputs) > 1 else param for i in range(len(inputs))]
    if sum(len(each) for each in inputs if isinstance(each, str)) > TOKENIZE_IN_THREAD_CHARS:
        return await asyncio.to_thread(_tokenize_all, client, inputs, names, truncate, limit)
    return _tokenize_all(client, inputs, names, truncate, limit)


def _tokenize_all(
    client: Client, inputs: Sequence[EmbeddingInput], names: Sequence[str], truncate: bool, limit: int | None
) -> list[list[int]]:
    """One after the other, until there are too many; a text that must be too long is not tokenized."""
    most, longest = max(MAX_TOKENS, client.model.context_length), max_token_bytes(client.tokenizer.vocabulary)
    found: list[list[int]] = []
    total = 0
    for each, name in zip(inputs, names, strict=True):
        least = -(-len(each) // longest) if isinstance(each, str) else len(each)
        ids = (
            _tokenize_input(client, each, name, truncate, limit or client.model.context_length)
            if total + least <= most
            else None
        )
        total += least if ids is None else len(ids)
        if ids is None or total > most:
            raise invalid(f"the inputs have more than {most} tokens in all", name.partition("[")[0])
        found.append(ids)
    return found


def _tokenize_input(client: Client, given: EmbeddingInput, name: str, truncate: bool, limit: int) -> list[int]:
    tokenizer = client.tokenizer
    if not given:
        raise invalid(f"'{name}' is empty", name)
    if isinstance(given, list):
        if any(not 0 <= token < client.model.vocab_size for token in given):
            raise invalid(f"'{name}' holds a token id that is not from 0 to {client.model.vocab_size - 1}", name)
        ids = given
    elif not truncate and len(given) > limit * max_token_bytes(tokenizer.vocabulary):
        text = f"{context_limit_message(limit)}; '{name}' has {len(given)} characters, which cannot be that few"
        raise ApiError(400, text, param=name, code="context_length_exceeded")
    else:
        ids = client.encode_for_embedding(given)
    if len(ids) > limit and truncate and len(tokenizer.suffix_ids) < limit:
        ending = list(tokenizer.suffix_ids)
        ids = ids[: limit - len(ending)] + ending
    if len(ids) > limit:
        text = f"{context_limit_message(limit)}; '{name}' has {len(ids)}"
        raise ApiError(400, text, param=name, code="context_length_exceeded")
    return ids


async def embed_prompts(
    client: Client, prompts: Sequence[Sequence[int]], embedding_options: EmbeddingOptions
) -> list[CallResult]:
    """One result for each prompt, in order. Raises the first failure that is met, and ApiError 503 for want of room."""
    if embedding_options.timeout_s is not None:
        sampling_params(timeout_s=embedding_options.timeout_s)  # the one validator of timeouts
    handle, began = EmbeddingHandle(), time.monotonic()
    if (record := current_request()) is not None:
        record.reserve_calls(min(MAX_CONCURRENT_INPUTS, len(prompts)))
        record.handles.append(handle)
    results: list[CallResult] = []
    pending_calls: deque[tuple[Session, Call]] = deque()
    try:
        for prompt in prompts:
            if len(pending_calls) == MAX_CONCURRENT_INPUTS:
                results.append(await _next(pending_calls))
            session = client.open_session(
                tenant=embedding_options.tenant,
                cache_salt=embedding_options.cache_salt,
                priority=embedding_options.priority,
            )
            handle.sessions.append(session)
            session.append_tokens(prompt)
            left = _remaining_timeout(embedding_options.timeout_s, began)
            call = session.embed(embedding_options.dimensions, normalize=embedding_options.normalize, timeout_s=left)
            handle.calls.append(call)
            pending_calls.append((session, call))
        while pending_calls:
            results.append(await _next(pending_calls))
    finally:
        for session in handle.sessions:
            session.abort()  # those that are closed stay as they are
    return results


async def _next(pending_calls: deque[tuple[Session, Call]]) -> CallResult:
    session, call = pending_calls[0]
    result = await call.aresult()
    session.close()
    pending_calls.popleft()
    return result


def _remaining_timeout(timeout_s: float | None, began: float) -> float | None:
    """Seconds that are left of the request's own timeout."""
    if timeout_s is None:
        return None
    left = began + timeout_s - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"the request took longer than its timeout of {timeout_s:g} s")
    return left
