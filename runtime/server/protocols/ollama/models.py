"""`/api/tags`, `/api/show`, `/api/ps` and `/api/version`: the models that are served, in Ollama's format."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from plait.runtime.chat.derivation.model_formats import formats_in_thread
from plait.runtime.errors import ModelError
from plait.runtime.server.app_state import state_of, use_model
from plait.runtime.server.engines.model_names import OLLAMA_TAG
from plait.runtime.server.engines.pooled_model import PooledModel
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import NOT_FOUND, ApiError, unsupported
from plait.runtime.server.http.error_bodies import OllamaErrorBody
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.ollama.model_description import UNREADABLE, ModelDescription, describe
from plait.runtime.tokenizer.chat_template import ChatTemplate

router = APIRouter()


class Details(msgspec.Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(msgspec.Struct):
    """`size` in bytes; `digest` is of the names, sizes and modification times of the model's files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class TagsResponse(msgspec.Struct):
    models: list[ModelEntry]


class LoadedModel(msgspec.Struct):
    """`expires_at`: when the model is unloaded if no request comes; null if it stays loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str | None
    size_vram: int
    context_length: int


class PsResponse(msgspec.Struct):
    models: list[LoadedModel]


class ShowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`verbose`: includes lists in the model's metadata."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    name: Annotated[str, Meta(min_length=1)] | None = None
    verbose: bool | None = None
    system: Any = None
    template: Any = None
    options: Any = None


class ShowResponse(msgspec.Struct):
    """`template`: the chat template, in Jinja."""

    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionResponse(msgspec.Struct):
    version: str


async def use_ollama_model(request: Request, name: str, keep_alive_s: float | None = None) -> ServedModel:
    """The model called `name`, loaded as by `use_model`; with a `keep_alive_s`, how long it stays so without requests.

    Raises ApiError 404, with Ollama's text, for a model that is not served here.
    """
    state, model = state_of(request), _find(request, name)
    model = await use_model(request, model.name)
    if keep_alive_s is not None and state.pool is not None and isinstance(model, PooledModel):
        state.pool.set_keep_alive(model, keep_alive_s)
    return model


def unload(request: Request, name: str) -> None:
    """Unloads a model of several as soon as it has no requests. Raises ApiError 404 as `use_ollama_model`."""
    state, model = state_of(request), _find(request, name)
    if state.pool is not None and isinstance(model, PooledModel):
        state.pool.set_keep_alive(model, 0.0)


def _find(request: Request, name: str) -> ServedModel:
    state = state_of(request)
    try:
        return state.find_model(name.removesuffix(OLLAMA_TAG))
    except ApiError:
        is_one = " served here" if state.pool is None else ""
        text = f"model '{name[:100]}' not found{state.served_names(name)}{is_one}"
        raise ApiError(404, text, type=NOT_FOUND, code="model_not_found") from None


@router.get("/api/tags", **documented(answer=TagsResponse, errors=(500, 503), error_body=OllamaErrorBody))
async def tags(request: Request) -> Response:
    """The models of this server, by all of their names."""
    state = state_of(request)
    descriptions = await asyncio.gather(*(_description(model) for model in state.models))
    return json_response(
        TagsResponse(
            [
                ModelEntry(name, name, about.modified_at, about.size, about.digest, _details(about))
                for model, about in zip(state.models, descriptions, strict=True)
                for name in [name + OLLAMA_TAG for name in model.names]
            ]
        )
    )


@router.get("/api/ps", **documented(answer=PsResponse, errors=(500, 503), error_body=OllamaErrorBody))
async def running_models(request: Request) -> Response:
    """The models in memory."""
    state = state_of(request)
    models = [model for model in state.models if state.pool is None or model.status == "loaded"]
    descriptions = await asyncio.gather(*(_description(model) for model in models))
    return json_response(PsResponse([_loaded(model, about) for model, about in zip(models, descriptions, strict=True)]))


def _loaded(model: ServedModel, about: ModelDescription) -> LoadedModel:
    name, info, expires_at = model.name + OLLAMA_TAG, model.info, None
    assert info is not None
    if isinstance(model, PooledModel) and model.keep_alive_s is not None:
        left_s = model.keep_alive_s if model.unload_at is None else max(0.0, model.unload_at - time.monotonic())
        expires_at = (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat().replace("+00:00", "Z")
    details, size = _details(about), about.size
    return LoadedModel(name, name, size, about.digest, details, expires_at, size, info.context_length)


@router.post("/api/show", **documented(ShowRequest, ShowResponse, error_body=OllamaErrorBody))
async def show(request: Request) -> Response:
    """The description of a model."""
    body = await read_json(request, ShowRequest, may_be_untyped=True)
    model = _find(request, body.model or body.name or "")
    for field in ("system", "template", "options"):
        if getattr(body, field):
            raise unsupported(field, "is not supported by this server")
    if model.info is None:
        await use_ollama_model(request, model.name)  # only the engine knows what the model can do
    info = model.info
    assert info is not None
    about, source = await _description(model), model.template_source
    formats = await formats_in_thread(ChatTemplate(source, "", ""))
    supported = {
        "completion": info.can_generate,
        "tools": bool(source) and info.can_generate,
        "thinking": formats.reasoning is not None,
        "embedding": info.embeddings is not None,
    }
    capabilities = [name for name, is_supported in supported.items() if is_supported]
    key = f"{about.family}.context_length"  # what requests may use, which the operator may have set
    context = {key: info.context_length}
    metadata = context | (about.metadata if body.verbose else about.short_metadata) | context
    return json_response(ShowResponse(source, _details(about), metadata, capabilities, about.modified_at))


@router.get("/api/version", **documented(answer=VersionResponse, errors=(500,), error_body=OllamaErrorBody))
async def ollama_version(request: Request) -> Response:
    """The version of plait."""
    return json_response(VersionResponse(version("plait")))


async def _description(model: ServedModel) -> ModelDescription:
    """Describes the files of a model. Those of a model that is not loaded may be missing or damaged."""
    path = str(model.spec.path) if isinstance(model, PooledModel) else model.client.model.model_path
    try:
        return await asyncio.to_thread(describe, path)
    except (ModelError, OSError, ValueError):
        if not isinstance(model, PooledModel):
            raise
        return UNREADABLE


def _details(description: ModelDescription) -> Details:
    return Details(
        "",
        description.format,
        description.family,
        [description.family],
        _short_count(description.num_parameters),
        description.quantization,
    )


def _short_count(count: int) -> str:
    """As Ollama writes it: 134.52M, 7.2B."""
    if count >= 10**9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count >= 10**6 else f"{count / 1e3:.2f}K"
