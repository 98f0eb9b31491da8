"""`/v1/embeddings`: refused by name, for every model that has no pooling, which today is every model.

Knows: OpenAI's embedding request. Must not know: models.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.server.errors import invalid
from plait.runtime.server.json_body import read_json
from plait.runtime.server.openapi import documented
from plait.runtime.server.state import state_of

router = APIRouter()


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's embedding request."""

    model: str
    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


@router.post("/v1/embeddings", **documented(EmbeddingRequest, errors=(400, 404, 413, 415, 500, 503)))
async def create_embedding(request: Request) -> Response:
    """Embeddings of texts, where the model can pool; no model served here can."""
    body = await read_json(request, EmbeddingRequest)
    state = state_of(request)
    state.check_model(body.model)
    text = f"the model '{state.model_name}' has no pooling, so it gives no embeddings"
    raise invalid(text, "model", "unsupported_by_model")
