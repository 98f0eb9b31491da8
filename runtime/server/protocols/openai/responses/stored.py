"""Stored responses, with `--store-responses`: the items before those of a request, how its response is kept, and the
routes at `/v1/responses/{id}`. Each API key sees its own only.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from msgspec.structs import replace
from starlette.responses import Response

from plait.runtime.server.app_state import request_id, state_of, tenant_of
from plait.runtime.server.errors import NOT_FOUND, ApiError, invalid, unsupported
from plait.runtime.server.fields.request_warnings import warn
from plait.runtime.server.http.json_body import convert_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.in_flight import current_request
from plait.runtime.server.protocols.batches.pages import Page, Paging, no_query, page, read_query
from plait.runtime.server.protocols.openai.responses import types
from plait.runtime.server.protocols.openai.responses.request import PlacedItem, placed_items
from plait.runtime.server.protocols.openai.responses.response import (
    MessageOutput,
    OutputTextPart,
    ResponseBody,
)
from plait.runtime.server.protocols.shared import StrictStruct
from plait.runtime.server.response_store import ResponseStore, StoredItems, StoredResponse

STORED_ID_BYTES = 24
NOT_STORED = "this server stores no responses; its operator can turn that on with --store-responses SECONDS"
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "additional_tools": "at",
}
_decode_items = msgspec.json.Decoder(list[types.Item]).decode
_decode = msgspec.json.Decoder(list[dict[str, Any]]).decode


@dataclass(frozen=True)
class Keeper:
    """Keeps the response of one request. store: None if it is not to be kept. input: the request's items."""

    store: ResponseStore | None
    response_id: str
    tenant: str
    input: Sequence[dict[str, Any]] = ()
    previous: StoredItems | None = None

    def keep(self, response: ResponseBody) -> ResponseBody:
        """Keeps a response that has ended, and returns it; `store` and `warnings` say if it could not be kept."""
        if self.store is None:
            return response
        output = [_without_logprobs(item) for item in response.output]
        ids = (*(item["id"] for item in self.input), *(item.id for item in output))
        items = StoredItems(msgspec.json.encode(self.input), msgspec.json.encode(output), ids, self.previous)
        if self.store.add(self.response_id, self.tenant, msgspec.json.encode(response), items):
            self.store.expire_in_time()
            return response
        limit = self.store.max_bytes_per_key
        text = f"the response is not stored: its conversation has {items.num_chain_bytes} bytes, of at most {limit}"
        return replace(response, store=False, warnings=[*(response.warnings or ()), text])


def store_of(request: Request) -> ResponseStore:
    """The server's stored responses. Raises ApiError 404 for a server that stores none."""
    store = state_of(request).responses
    if store is None:
        raise ApiError(404, NOT_STORED, type=NOT_FOUND, code="responses_not_stored")
    return store


def stored_response(request: Request, response_id: str) -> StoredResponse:
    """The response of the caller's key. Raises ApiError 404 if there is none."""
    response = store_of(request).get(response_id, tenant_of(request))
    if response is None:
        text = f"Response with id '{response_id[:100]}' not found."
        raise ApiError(404, text, type=NOT_FOUND, param="response_id", code="response_not_found")
    return response


class ConversationItems(NamedTuple):
    """items: of the whole conversation. own: those of the request, as they were sent. previous: those before it."""

    items: Sequence[PlacedItem]
    own: Sequence[dict[str, Any]]
    previous: StoredItems | None


async def all_items(request: Request, body: types.ResponsePrompt) -> ConversationItems:
    """The items of the conversation, those of earlier responses included.

    Raises ApiError 400 for a response or an item that is not stored.
    """
    store, tenant = state_of(request).responses, tenant_of(request)
    previous = _previous(store, body, tenant)
    items: list[PlacedItem] = []
    for data in previous.conversation() if previous is not None else ():
        items += [("previous_response_id", item) for item in _decode_items(data)]
        await asyncio.sleep(0)
    own = body.input
    if isinstance(own, str):
        own = [{"role": "user", "content": own}]
        items.append(("input", types.MessageItem("user", own[0]["content"])))
    else:
        own = _with_stored_items(own, store, tenant)
        items += placed_items(own)
    return ConversationItems(items, own, previous)


def keeper_of(request: Request, body: types.ResponsesRequest, items: ConversationItems) -> Keeper:
    """What keeps the response to a request, if it is to be kept."""
    store, tenant = state_of(request).responses, tenant_of(request)
    record = current_request()
    is_background = record is not None and record.is_background
    if store is None or body.store is False or is_background:
        if body.store:
            warn("store", "lines of batches are not stored" if store is not None else NOT_STORED)
        return Keeper(None, "resp_" + request_id(request)[4:], tenant)
    # A stored response can be read by those who know its id: the id of the request stands in the log.
    response_id = f"resp_{secrets.token_hex(STORED_ID_BYTES)}"
    return Keeper(store, response_id, tenant, [_with_id(item) for item in items.own], items.previous)


def _previous(store: ResponseStore | None, body: types.ResponsePrompt, tenant: str) -> StoredItems | None:
    name = "previous_response_id"
    if body.previous_response_id is None:
        return None
    if store is None:
        raise unsupported(name, f"names a stored response, and {NOT_STORED}")
    response = store.get(body.previous_response_id, tenant)
    if response is None:
        text = f"Previous response with id '{body.previous_response_id[:100]}' not found."
        raise invalid(f"{text} Responses are kept for {store.lifetime_s:g} s.", name, "previous_response_not_found")
    return response.items


def _with_stored_items(
    items: Sequence[dict[str, Any]], store: ResponseStore | None, tenant: str
) -> list[dict[str, Any]]:
    """`items` of a request with the stored items in place of references to them."""
    found: dict[StoredItems, Mapping[str, dict[str, Any]]] = {}
    whole: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.get("type") != "item_reference":
            whole.append(item)
            continue
        item_id = convert_json(item, types.ItemReference, place).id
        if store is None:
            raise unsupported(place, f"refers to a stored item, and {NOT_STORED}")
        stored = store.items_with(item_id, tenant)
        if stored is None:
            raise invalid(f"Item with id '{item_id[:100]}' not found.", f"{place}.id", "item_not_found")
        if stored not in found:
            found[stored] = {one["id"]: one for data in (stored.input, stored.output) for one in _decode(data)}
        whole.append(found[stored][item_id])
    return whole


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of a request as `/input_items` shows it: with an id, and the text of a message as a part."""
    item = {"type": "message", **item}
    if item["type"] == "message":
        item.setdefault("status", "completed")
        if isinstance(item["content"], str):
            is_answer = item["role"] == "assistant"
            part = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
            item["content"] = [part | {"text": item["content"]}]
    return item | {"id": item.get("id") or f"{_PREFIXES[item['type']]}_{secrets.token_hex(12)}"}


def _without_logprobs(item: Any) -> Any:
    if not isinstance(item, MessageOutput):
        return item
    return replace(item, content=[OutputTextPart(part.text) for part in item.content])


# -- routes ---------------------------------------------------------------------------------------

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


class ItemList(Page[dict[str, Any]]):
    """A page of items."""


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
    **documented(answer=ItemList, errors=READ_ERRORS, query=ItemsQuery),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that a stored response answers, those of the responses before it included."""
    query = read_query(request, ItemsQuery)
    *lists, _ = stored_response(request, response_id).items.conversation()  # without its own output
    items = [(item["id"], item) for data in lists for item in msgspec.json.decode(data)]
    return page(items if query.order == "asc" else items[::-1], query)
