"""`/v1/embeddings`: one vector for each text or token list, as numbers or in base64.

Source: https://platform.openai.com/docs/api-reference/embeddings.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from plait.runtime.client.call import CallResult
from plait.runtime.sampling_params import MAX_TIMEOUT_S
from plait.runtime.server.app_state import tenant_of, use_model_in_turn
from plait.runtime.server.errors import invalid
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.embedding import (
    LARGE_VECTORS,
    Dimensions,
    EmbeddingInput,
    EmbeddingOptions,
    check_can_embed,
)
from plait.runtime.server.generation.threads import run_in_thread_if
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response_in_pieces
from plait.runtime.server.protocols.answer import embed_in_turn
from plait.runtime.server.protocols.shared import Priority, StrictStruct

router = APIRouter()

Encoding = Literal["float", "base64"]


class EmbeddingRequest(StrictStruct):
    """OpenAI's embedding request. `input`: a text, a list of texts, a list of token ids, or a list of such lists.

    `dimensions`: vectors are cut to this size. `cache_salt`, `priority` and `timeout` (seconds) are extensions.
    """

    field_table: ClassVar[str] = "embeddings"
    model: str
    input: str | list[str | int | list[int]]
    dimensions: Dimensions | None = None
    encoding_format: Encoding | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """One embedding for each input, in order. `warnings` is an extension."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
    warnings: list[str] | UnsetType = UNSET


@router.post("/v1/embeddings", **documented(EmbeddingRequest, EmbeddingList))
async def create_embedding(request: Request) -> Response:
    """The embedding of each input. 400 for a model that has no pooling."""
    body = await read_json(request, EmbeddingRequest)
    model = await use_model_in_turn(request, body.model, body.timeout)
    check_can_embed(model.client, model.name, body.dimensions)
    options = EmbeddingOptions(
        dimensions=body.dimensions,
        timeout_s=body.timeout,
        tenant=tenant_of(request),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
    results = await embed_in_turn(request, model, split_inputs(body.input), "input", options)
    is_large = len(results) > LARGE_VECTORS
    response = await run_in_thread_if(is_large, _response, results, body.model, body.encoding_format or "float")
    return await json_response_in_pieces(response)


def split_inputs(value: str | Sequence[str | int | list[int]]) -> list[EmbeddingInput]:
    """The inputs of `input`, each a text or a token list. Raises ApiError 400 for lists that mix types."""
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value))
    if len(kinds) > 1:
        raise invalid("'input' mixes token ids with texts or lists", "input")
    inputs: Any = [value] if kinds == {int} else value
    return list(inputs)


def _response(results: Sequence[CallResult], model: str, encoding: Encoding) -> EmbeddingList:
    data = [Embedding(index, _encode_vector(result, encoding)) for index, result in enumerate(results)]
    num_tokens = sum(result.usage.prompt_tokens for result in results)
    return EmbeddingList(data, model, EmbeddingUsage(num_tokens, num_tokens), warnings=request_warnings())


def _encode_vector(result: CallResult, encoding: Encoding) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(result.embedding_bytes or b"").decode()
    numbers: list[float] = result.embedding.tolist()
    return numbers
