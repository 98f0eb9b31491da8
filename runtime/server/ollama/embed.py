"""`/api/embed`, and `/api/embeddings` before it: Ollama's requests for vectors.

Knows: Ollama's names and defaults. Must not know: sessions, how anything is pooled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.errors import PlaitError
from plait.runtime.server.answering import json_answer, unless_gone
from plait.runtime.server.embedding import Wanted, check_can_embed, check_dimensions, embedded, token_ids
from plait.runtime.server.error_shapes import OllamaErrorBody
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.json_body import read_json
from plait.runtime.server.ollama.models import check_name
from plait.runtime.server.ollama.request import check_keep_alive, check_options
from plait.runtime.server.ollama.types import REFUSED_OPTIONS, Options
from plait.runtime.server.openapi import documented
from plait.runtime.server.state import state_of, tenant_of

router = APIRouter()

# nothing is sampled here
SAMPLING = ("num_predict", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
REFUSED = REFUSED_OPTIONS | dict.fromkeys((*SAMPLING, "presence_penalty", "frequency_penalty"), ())


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`truncate` (true unless it is false): an input that is longer than the context, or than `num_ctx`, loses its end.
    Without any input, whether the model is there.
    """

    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class Embedded(msgspec.Struct):
    """One vector of length 1 for each input; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One text, whose end is cut off where it is too long."""

    model: Annotated[str, Meta(min_length=1)]
    prompt: str
    options: Options | None = None
    keep_alive: float | str | None = None


class OldEmbedded(msgspec.Struct):
    """The vector as it is pooled, of whatever length."""

    embedding: list[float]


@router.post("/api/embed", **documented(EmbedRequest, Embedded, error_body=OllamaErrorBody))
async def embed(request: Request) -> Response:
    """Vectors of one or many texts."""
    body = await read_json(request, EmbedRequest)
    inputs = body.input if isinstance(body.input, list) else [body.input] if body.input else []
    results = await _results(request, body, inputs, "input", body.truncate is not False, body.dimensions, True)
    longest = max((result.usage.wall_s for result in results), default=0.0)
    count = sum(result.usage.prompt_tokens for result in results)
    vectors = [result.embedding.tolist() for result in results]
    return json_answer(Embedded(body.model, vectors, int(longest * 1e9), 0, count))


@router.post("/api/embeddings", **documented(OldEmbedRequest, OldEmbedded, error_body=OllamaErrorBody))
async def old_embed(request: Request) -> Response:
    """The vector of one text."""
    body = await read_json(request, OldEmbedRequest)
    results = await _results(request, body, [body.prompt] if body.prompt else [], "prompt", True, None, False)
    return json_answer(OldEmbedded(results[0].embedding.tolist() if results else []))


async def _results(
    request: Request,
    body: EmbedRequest | OldEmbedRequest,
    inputs: list[str],
    param: str,
    cut: bool,
    dimensions: int | None,
    normalize: bool,
) -> list[CallResult]:
    state = state_of(request)
    check_name(state, body.model)
    check_keep_alive(body.keep_alive)
    check_can_embed(state)
    client, options = state.client, body.options or Options()
    check_options(options, REFUSED, client.model.context_length)
    check_dimensions(client, dimensions)
    if not inputs:
        return []
    prompts = await token_ids(client, inputs, param, cut=cut, limit=options.num_ctx)
    wanted = Wanted(dimensions=dimensions, normalize=normalize, tenant=tenant_of(request))
    try:
        return await unless_gone(request, embedded(client, prompts, wanted))
    except PlaitError as error:
        raise as_api_error(error) from error
