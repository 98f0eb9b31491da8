"""`/api/tags`, `/api/show`, `/api/ps` and `/api/version`: the one model that is served, in Ollama's format."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from plait.runtime.server.app_state import AppState, state_of
from plait.runtime.server.chat.formats import reasoning_format
from plait.runtime.server.errors import NOT_FOUND, ApiError, unsupported
from plait.runtime.server.http.error_bodies import OllamaErrorBody
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.ollama.model_description import ModelDescription, describe

router = APIRouter()

TAG = ":latest"  # Ollama's clients add it to a name without a tag


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
    """`expires_at` is null: the model is never unloaded."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: None
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


def check_model_name(state: AppState, name: str) -> None:
    """Raises ApiError 404, with Ollama's text, for a model that is not served here."""
    try:
        state.check_model(name.removesuffix(TAG))
    except ApiError:
        text = f"model '{name[:100]}' not found; '{state.model_name}' is served here"
        raise ApiError(404, text, type=NOT_FOUND, code="model_not_found") from None


@router.get("/api/tags", **documented(answer=TagsResponse, errors=(500, 503), error_body=OllamaErrorBody))
async def tags(request: Request) -> Response:
    """The models of this server."""
    state, description = state_of(request), await _description(request)
    name = state.model_name + TAG
    return json_response(
        TagsResponse(
            [
                ModelEntry(
                    name, name, description.modified_at, description.size, description.digest, _details(description)
                )
            ]
        )
    )


@router.get("/api/ps", **documented(answer=PsResponse, errors=(500, 503), error_body=OllamaErrorBody))
async def running_models(request: Request) -> Response:
    """The models in memory."""
    state, description = state_of(request), await _description(request)
    name, context = state.model_name + TAG, state.client.model.context_length
    return json_response(
        PsResponse(
            [
                LoadedModel(
                    name,
                    name,
                    description.size,
                    description.digest,
                    _details(description),
                    None,
                    description.size,
                    context,
                )
            ]
        )
    )


@router.post("/api/show", **documented(ShowRequest, ShowResponse, error_body=OllamaErrorBody))
async def show(request: Request) -> Response:
    """The description of a model."""
    body = await read_json(request, ShowRequest)
    state = state_of(request)
    check_model_name(state, body.model or body.name or "")
    for field in ("system", "template", "options"):
        if getattr(body, field):
            raise unsupported(field, "is not supported by this server")
    description = await _description(request)
    template = state.client.tokenizer.chat_template
    source = template.source if template is not None else ""
    model = state.client.model
    supported = {
        "completion": model.can_generate,
        "tools": bool(source) and model.can_generate,
        "thinking": reasoning_format(source) is not None,
        "embedding": model.embeddings is not None,
    }
    capabilities = [name for name, is_supported in supported.items() if is_supported]
    info = description.metadata if body.verbose else description.short_metadata
    return json_response(ShowResponse(source, _details(description), info, capabilities, description.modified_at))


@router.get("/api/version", **documented(answer=VersionResponse, errors=(500,), error_body=OllamaErrorBody))
async def ollama_version(request: Request) -> Response:
    """The version of plait."""
    return json_response(VersionResponse(version("plait")))


async def _description(request: Request) -> ModelDescription:
    return await asyncio.to_thread(describe, state_of(request).client.model.model_path)


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
