"""`/v1/responses/{id}`: the responses that are stored, with `--store-responses`. Each API key sees its own only.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.batches.pages import Page, Paging, no_query, page, read_query
from plait.runtime.server.protocols.openai.responses.response_object import ResponseBody
from plait.runtime.server.protocols.openai.responses.stored_conversation import store_of, stored_response
from plait.runtime.server.protocols.shared import StrictStruct

router = APIRouter()

READ_ERRORS = (400, 401, 403, 404, 500)


class ResponseQuery(StrictStruct):
    """Query parameters of a response. A stored response is not streamed."""

    stream: Literal["false"] | None = None
    include_obfuscation: Literal["false"] | None = None


class ItemsQuery(Paging):
    """Query parameters of a list of items, which begins with the newest unless `order` is asc."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@router.get("/v1/responses/{response_id}", **documented(answer=ResponseBody, errors=READ_ERRORS, query=ResponseQuery))
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    read_query(request, ResponseQuery)
    return Response(stored_response(request, response_id).body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", **documented(answer=DeletedResponse, errors=(*READ_ERRORS, 429, 503)))
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a stored response. Responses that continue it can still be continued."""
    no_query(request)
    store_of(request).delete(stored_response(request, response_id))
    return json_response(DeletedResponse(response_id))


@router.get(
    "/v1/responses/{response_id}/input_items",
    **documented(answer=Page[dict[str, Any]], errors=READ_ERRORS, query=ItemsQuery),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that a stored response answers, those of the responses before it included."""
    query = read_query(request, ItemsQuery)
    *lists, _ = stored_response(request, response_id).items.conversation()  # without its own output
    items = [(item["id"], item) for data in lists for item in msgspec.json.decode(data)]
    return page(items if query.order == "asc" else items[::-1], query)
