"""`/api/embed` and the older `/api/embeddings`: Ollama's requests for embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.sampling_params import NAMES
from plait.runtime.server.app_state import state_of, tenant_of
from plait.runtime.server.fields.request_warnings import request_warnings, warn
from plait.runtime.server.generation.embedding import LARGE_VECTORS, Dimensions, EmbeddingOptions, check_can_embed
from plait.runtime.server.generation.threads import run_in_thread_if
from plait.runtime.server.http.error_bodies import OllamaErrorBody
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.answer import embed_in_turn
from plait.runtime.server.protocols.ollama.models import use_ollama_model
from plait.runtime.server.protocols.ollama.request import (
    SAMPLING_OF_REQUEST,
    OllamaOptions,
    check_num_ctx,
    keep_alive_of,
)
from plait.runtime.server.protocols.shared import StrictStruct

router = APIRouter()


class EmbedRequest(StrictStruct):
    """`truncate`, the default: an input longer than the context, or than `num_ctx`, loses its end.

    Without inputs the answer only says that the model is loaded.
    """

    field_table: ClassVar[str] = "ollama_embed"
    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class EmbedResponse(msgspec.Struct):
    """One vector of length 1 for each input; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    warnings: list[str] | UnsetType = UNSET


class LegacyEmbedRequest(StrictStruct):
    """One text. If it is too long it loses its end."""

    field_table: ClassVar[str] = "ollama_embed"
    model: Annotated[str, Meta(min_length=1)]
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class LegacyEmbedResponse(msgspec.Struct):
    """The pooled vector, not normalized."""

    embedding: list[float]
    warnings: list[str] | UnsetType = UNSET


@router.post("/api/embed", **documented(EmbedRequest, EmbedResponse, error_body=OllamaErrorBody))
async def embed(request: Request) -> Response:
    """Vectors of one or many texts."""
    body = await read_json(request, EmbedRequest, may_be_untyped=True)
    inputs = body.input if isinstance(body.input, list) else [body.input] if body.input else []
    results = await _results(request, body, inputs, "input", body.truncate is not False, body.dimensions, True)
    longest = max((result.usage.wall_s for result in results), default=0.0)
    count = sum(result.usage.prompt_tokens for result in results)
    vectors = await run_in_thread_if(
        len(results) > LARGE_VECTORS, lambda: [result.embedding.tolist() for result in results]
    )
    return json_response(EmbedResponse(body.model, vectors, int(longest * 1e9), 0, count, request_warnings()))


@router.post("/api/embeddings", **documented(LegacyEmbedRequest, LegacyEmbedResponse, error_body=OllamaErrorBody))
async def old_embed(request: Request) -> Response:
    """The vector of one text."""
    body = await read_json(request, LegacyEmbedRequest, may_be_untyped=True)
    results = await _results(request, body, [body.prompt] if body.prompt else [], "prompt", True, None, False)
    return json_response(LegacyEmbedResponse(results[0].embedding.tolist() if results else [], request_warnings()))


async def _results(
    request: Request,
    body: EmbedRequest | LegacyEmbedRequest,
    inputs: list[str],
    param: str,
    truncate: bool,
    dimensions: int | None,
    normalize: bool,
) -> list[CallResult]:
    keep_alive_s = keep_alive_of(body.keep_alive, can_unload=state_of(request).pool is not None)
    model = await use_ollama_model(request, body.model, keep_alive_s)
    check_can_embed(model.client, model.name, dimensions)
    options = body.options or OllamaOptions()
    check_num_ctx(options, model.client.model.context_length)
    for field, name in NAMES["ollama"].items():  # an embedding samples nothing
        if field not in SAMPLING_OF_REQUEST and getattr(options, name) is not None:
            warn(f"options.{name}", "an embedding samples nothing")
    if not inputs:
        return []
    how = EmbeddingOptions(dimensions=dimensions, normalize=normalize, tenant=tenant_of(request))
    return await embed_in_turn(request, model, inputs, param, how, truncate=truncate, limit=options.num_ctx)
