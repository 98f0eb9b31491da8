"""SGLang's endpoints beside `/generate`: model, server state, cache and health."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from plait.runtime.client.client import Client
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.app_state import AppState, state_of, tenant_of, use_model
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.generation.embedding import EmbeddingOptions, embed_prompts
from plait.runtime.server.generation.submission import Submission, submit
from plait.runtime.server.http.json_body import check_content_type
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import cancel_on_disconnect, json_response

router = APIRouter()

HEALTH_TIMEOUT_S = 20.0


class ModelInfo(msgspec.Struct):
    """The model; `model_path` is a path on the server's machine."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    vocab_size: int
    is_generation: bool = True
    preferred_sampling_params: None = None
    weight_version: str = "default"
    has_image_understanding: Literal[False] = False
    has_audio_understanding: Literal[False] = False


class SchedulerState(msgspec.Struct):
    """The scheduler's load; one page of the cache has one token."""

    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float
    num_cached_tokens: int


class ServerInfo(msgspec.Struct):
    model_path: str
    served_model_name: str
    context_length: int
    max_total_num_tokens: int
    version: str
    internal_states: list[SchedulerState]


@router.get("/get_model_info", **documented(answer=ModelInfo, errors=(500, 503)))
@router.get("/model_info", **documented(answer=ModelInfo, errors=(500, 503)))
async def model_info(request: Request) -> Response:
    """The model called `model` in the query, or else the first one, which is loaded for that."""
    served = await use_model(request, request.query_params.get("model"))
    model = served.client.model
    path = model.model_path
    return json_response(ModelInfo(path, path, served.name, model.context_length, model.vocab_size, model.can_generate))


@router.get("/get_server_info", **documented(answer=ServerInfo, errors=(500, 503)))
@router.get("/server_info", **documented(answer=ServerInfo, errors=(500, 503)))
async def server_info(request: Request) -> Response:
    """The state of the engine of the model called `model` in the query, or else of the first one."""
    model = await use_model(request, request.query_params.get("model"))
    return json_response(await cancel_on_disconnect(request, _server_info(model)))


async def _server_info(served: ServedModel) -> ServerInfo:
    client = served.client
    now = await asyncio.to_thread(client.status)
    used = now.used_pages / now.total_pages
    scheduler = SchedulerState(now.running_calls, now.waiting_calls, used, now.cached_pages)
    model = client.model
    return ServerInfo(
        model.model_path, served.name, model.context_length, now.total_pages, version("plait"), [scheduler]
    )


async def _flush(request: Request) -> Response:
    state = state_of(request)
    tenant = tenant_of(request) if state.settings.api_keys else None
    clients = [model.client for model in state.models if model.backend is not None]
    await cancel_on_disconnect(request, asyncio.to_thread(_flush_all, clients, tenant))
    return PlainTextResponse("The cache was flushed; what running calls need is kept.\n")


def _flush_all(clients: Sequence[Client], tenant: str | None) -> None:
    for client in clients:
        client.flush_cache(tenant)


_FLUSHES: dict[str, Any] = {
    "responses": {200: {"description": "Done.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
}


@router.post("/flush_cache", **_FLUSHES)
async def flush_cache(request: Request) -> Response:
    """Drops every cached prefix of the request's key, or without keys of all, that no running call needs.

    The body is not read and may be missing.
    """
    check_content_type(request, may_be_missing=True)
    return await _flush(request)


@router.get("/flush_cache", **_FLUSHES)
async def flush_cache_by_get(request: Request) -> Response:
    """As POST, for older clients of SGLang. Browsers are refused, since any page can make them send a GET."""
    return await _flush(request)


@router.get("/health_generate", **documented(errors=(500, 503, 504)))
async def health_generate(request: Request) -> Response:
    """200 once one token was generated for this request, or embedded if the model only embeds.

    With several models by the one called `model` in the query, or else by the first one that is loaded.
    """
    model = await use_model(request, request.query_params.get("model") or _first_loaded(state_of(request)))
    await cancel_on_disconnect(request, _one_token(model.client))
    return json_response({})


def _first_loaded(state: AppState) -> str | None:
    return next((model.name for model in state.models if model.status == "loaded"), None)


async def _one_token(client: Client) -> None:
    token = next(iter(client.tokenizer.eos_ids), 0)
    if not client.model.can_generate:
        await embed_prompts(
            client, [[token]], EmbeddingOptions(timeout_s=HEALTH_TIMEOUT_S, tenant="health", priority=1_000_000)
        )
        return
    sampling = sampling_params(max_tokens=1, temperature=0.0, timeout_s=HEALTH_TIMEOUT_S)
    submission = Submission([token], sampling, tenant="health", priority=1_000_000)
    async with submit(client, [submission]) as handle:
        await handle.results()
