"""`/v1/models`: the models that are served."""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.server.app_state import AppState, state_of
from plait.runtime.server.engines.served_model import ModelStatus, ServedModel
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response

router = APIRouter()


class Model(msgspec.Struct):
    """OpenAI's model object. `max_model_len`: the context length in tokens, null until the model is first loaded.

    `root`: the model's own name, which differs from `id` for an alias. `parent`: of an adapter, the model's name.
    """

    id: str
    created: int
    max_model_len: int | None
    status: ModelStatus
    root: str
    parent: str | None = None
    object: Literal["model"] = "model"
    owned_by: str = "plait"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


def _model(state: AppState, name: str, model: ServedModel) -> Model:
    info, adapter = model.info, model.adapter_of(name)
    length = None if info is None else info.context_length
    root, parent = (adapter, model.name) if adapter else (model.name, None)
    return Model(name, state.started_at, length, model.status, root, parent)


@router.get("/v1/models", **documented(answer=ModelList, errors=(500, 503)))
async def list_models(request: Request) -> Response:
    """The models of this server, by all of their names."""
    state = state_of(request)
    return json_response(ModelList([_model(state, name, model) for model in state.models for name in model.names]))


@router.get("/v1/models/{model:path}", **documented(answer=Model, errors=(404, 500, 503)))
async def get_model(request: Request, model: str) -> Response:
    """One model, by its name."""
    state = state_of(request)
    found = state.find_model(model)
    return json_response(_model(state, model if model in found.names else found.name, found))
