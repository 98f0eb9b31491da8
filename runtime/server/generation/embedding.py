"""Computes embeddings of texts and token lists, for all protocols that have them.

At most `MAX_CONCURRENT_INPUTS` inputs of a request run at once, so that it shares the runtime with other requests. An
error or a cancellation aborts the running ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.errors import DeadlineExceeded
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.errors import ApiError, context_limit_message, invalid
from plait.runtime.server.generation.submission import (
    TOKENIZE_IN_THREAD_CHARS,
    RequestHandle,
    max_token_bytes,
    open_session,
)
from plait.runtime.server.in_flight import RequestSize, current_request

MAX_INPUTS = 2048  # per request, as OpenAI's limit
MAX_TOKENS = 300_000  # of all inputs, as OpenAI's limit; the context length if that is more
MAX_CONCURRENT_INPUTS = 64
LARGE_VECTORS = 64  # an answer with more of them is made in a thread

EmbeddingInput = str | list[int]
Dimensions = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class EmbeddingOptions:
    """The options of a request; see `Session.embed`. `timeout_s` applies to the whole request."""

    dimensions: int | None = None
    normalize: bool | None = None
    timeout_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


def check_can_embed(client: Client, name: str) -> None:
    """Raises ApiError 400 with the reason if the model, which clients call `name`, has no embeddings."""
    model = client.model
    if model.embeddings is None:
        text = f"the model '{name}' cannot compute embeddings: {model.no_embeddings_reason}"
        raise invalid(text, "model", "unsupported_by_model")


def check_dimensions(client: Client, dimensions: int | None) -> None:
    """Raises ApiError 400 if `dimensions` is not between 1 and the length of the model's vectors."""
    embeddings = client.model.embeddings
    if embeddings is not None and dimensions is not None and not 1 <= dimensions <= embeddings.size:
        message = f"'dimensions' must be from 1 to {embeddings.size} for this model, not {dimensions}"
        raise invalid(message, "dimensions")


async def tokenize_inputs(
    client: Client, inputs: Sequence[EmbeddingInput], param: str, *, truncate: bool = False, limit: int | None = None
) -> list[list[int]]:
    """Returns the token ids of each input.

    A text is tokenized with the model's special tokens, after the prompt of the model's files; token ids are unchanged.
    `limit`: the maximum length in tokens (None: the context). `truncate`: cut longer inputs instead of refusing them.
    Raises ApiError, which names the input as `param[i]`.
    """
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise invalid(f"'{param}' must hold from 1 to {MAX_INPUTS} inputs, not {len(inputs)}", param)
    names = [f"{param}[{i}]" if len(inputs) > 1 else param for i in range(len(inputs))]
    if sum(map(len, inputs)) > TOKENIZE_IN_THREAD_CHARS:
        return await asyncio.to_thread(_tokenize_all, client, inputs, names, truncate, limit)
    return _tokenize_all(client, inputs, names, truncate, limit)


def _tokenize_all(
    client: Client, inputs: Sequence[EmbeddingInput], names: Sequence[str], truncate: bool, limit: int | None
) -> list[list[int]]:
    """Tokenizes the inputs in order, up to the limit on their sum. A text that must exceed it is not tokenized."""
    max_tokens = max(MAX_TOKENS, client.model.context_length)
    longest_token = max_token_bytes(client.tokenizer.vocabulary)
    input_limit = limit or client.model.context_length
    prompts: list[list[int]] = []
    num_tokens = 0
    for item, name in zip(inputs, names, strict=True):
        min_tokens = -(-len(item) // longest_token) if isinstance(item, str) else len(item)
        is_within_limit = num_tokens + min_tokens <= max_tokens
        ids = _tokenize_input(client, item, name, truncate, input_limit) if is_within_limit else []
        num_tokens += len(ids)
        if not is_within_limit or num_tokens > max_tokens:
            raise invalid(f"the inputs have more than {max_tokens} tokens in all", name.partition("[")[0])
        prompts.append(ids)
    return prompts


def _tokenize_input(client: Client, item: EmbeddingInput, name: str, truncate: bool, limit: int) -> list[int]:
    tokenizer = client.tokenizer
    if not item:
        raise invalid(f"'{name}' is empty", name)
    if isinstance(item, list):
        vocab_size = client.model.vocab_size
        if not 0 <= min(item) <= max(item) < vocab_size:
            raise invalid(f"'{name}' holds a token id that is not from 0 to {vocab_size - 1}", name)
        ids = item
    elif not truncate and len(item) > limit * max_token_bytes(tokenizer.vocabulary):
        text = f"{context_limit_message(limit)}; '{name}' has {len(item)} characters, which are more tokens than that"
        raise ApiError(400, text, param=name, code="context_length_exceeded")
    else:
        ids = client.encode_for_embedding(item)
    if len(ids) > limit and truncate and len(tokenizer.suffix_ids) < limit:
        suffix_ids = list(tokenizer.suffix_ids)
        ids = ids[: limit - len(suffix_ids)] + suffix_ids
    if len(ids) > limit:
        text = f"{context_limit_message(limit)}; '{name}' has {len(ids)}"
        raise ApiError(400, text, param=name, code="context_length_exceeded")
    return ids


async def embed_prompts(
    client: Client, prompts: Sequence[Sequence[int]], options: EmbeddingOptions
) -> list[CallResult]:
    """Returns one result per prompt, in order. Raises the first failure, and ApiError 503 for lack of capacity."""
    if options.timeout_s is not None:
        sampling_params(timeout_s=options.timeout_s)  # raises InputError for a wrong timeout
    handle, start_time, request_timeout_s = RequestHandle(), time.monotonic(), options.timeout_s
    if (record := current_request()) is not None:
        num_calls = min(MAX_CONCURRENT_INPUTS, len(prompts))
        record.reserve_calls(RequestSize(num_calls))
        record.handles.append(handle)
        request_timeout_s = record.limit_timeout(request_timeout_s)
    results: list[CallResult] = []
    pending_calls: deque[tuple[Session, Call]] = deque()
    try:
        for prompt in prompts:
            if len(pending_calls) == MAX_CONCURRENT_INPUTS:
                results.append(await _next_result(pending_calls))
            session = open_session(client, options.tenant, options.cache_salt, options.priority, record)
            handle.sessions.append(session)
            session.append_tokens(prompt)
            timeout_s = _remaining_timeout(request_timeout_s, start_time)
            call = session.embed(options.dimensions, normalize=options.normalize, timeout_s=timeout_s)
            handle.calls.append(call)
            pending_calls.append((session, call))
        while pending_calls:
            results.append(await _next_result(pending_calls))
    finally:
        handle.abort()
    return results


async def _next_result(pending_calls: deque[tuple[Session, Call]]) -> CallResult:
    session, call = pending_calls[0]
    result = await call.aresult()
    session.close()
    pending_calls.popleft()
    return result


def _remaining_timeout(timeout_s: float | None, start_time: float) -> float | None:
    """Returns the seconds left of the request's timeout. Raises DeadlineExceeded if none are left."""
    if timeout_s is None:
        return None
    remaining_s = start_time + timeout_s - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineExceeded(f"the request took longer than its timeout of {timeout_s:g} s")
    return remaining_s
