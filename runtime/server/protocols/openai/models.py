"""`/v1/models`: the one model that is served."""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.server.app_state import AppState, state_of
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response

router = APIRouter()


class Model(msgspec.Struct):
    """OpenAI's model object. `max_model_len`: the context length in tokens."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "plait"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


def _model(state: AppState) -> Model:
    return Model(state.model_name, state.started_at, state.client.model.context_length)


@router.get("/v1/models", **documented(answer=ModelList, errors=(500, 503)))
async def list_models(request: Request) -> Response:
    """The models of this server."""
    return json_response(ModelList([_model(state_of(request))]))


@router.get("/v1/models/{model:path}", **documented(answer=Model, errors=(404, 500, 503)))
async def get_model(request: Request, model: str) -> Response:
    """One model, by its name."""
    state = state_of(request)
    state.check_model(model)
    return json_response(_model(state))
