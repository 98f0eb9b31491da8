"""`/v1/batches`: runs the requests of a file beside all others, and keeps their answers.

Source: https://platform.openai.com/docs/api-reference/batch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from plait.runtime.server.app_state import state_of, tenant_of
from plait.runtime.server.batches.records import DAY_S, Batch, Endpoint, shown
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.batches.pages import (
    Page,
    Paging,
    disk_errors,
    no_query,
    page,
    read_query,
    service_of,
)
from plait.runtime.server.protocols.shared import StrictStruct

# -- types ----------------------------------------------------------------------------------------
# The request that creates a batch, and when a file is deleted.

DEFAULT_LIFETIME_S = 30 * DAY_S
Lifetime = Annotated[int, Meta(ge=3600, le=DEFAULT_LIFETIME_S)]


class ExpiresAfter(StrictStruct):
    """When a file is deleted: `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: Lifetime


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class CreateBatch(StrictStruct):
    """A new batch. `input_file_id`: a file with the purpose batch. `output_expires_after`: of its result files."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(Page[Batch]):
    """A page of batches."""


# -- batches --------------------------------------------------------------------------------------

router = APIRouter()

READ_ERRORS = (400, 401, 403, 404, 500)
CHANGE_ERRORS = (*READ_ERRORS, 408, 409, 413, 415, 429, 503, 507)


class BatchQuery(Paging):
    """Query parameters of a list of batches, which begins with the newest."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20


@router.post("/v1/batches", **documented(CreateBatch, Batch, errors=CHANGE_ERRORS))
async def create_batch(request: Request) -> Response:
    """Creates a batch. Its lines run when the server has nothing better to do."""
    body = await read_json(request, CreateBatch)
    service, expiry = service_of(request), body.output_expires_after
    with disk_errors():
        record = await service.create(
            tenant_of(request),
            body.input_file_id,
            body.endpoint,
            body.metadata,
            model.last_name if (model := state_of(request).only_model) is not None else None,
            DEFAULT_LIFETIME_S if expiry is None else expiry.seconds,
        )
    return json_response(shown(record, Batch))


@router.get("/v1/batches", **documented(answer=BatchList, errors=READ_ERRORS, query=BatchQuery))
async def list_batches(request: Request) -> Response:
    """The batches of the caller's key, the newest first."""
    query = read_query(request, BatchQuery)
    records = service_of(request).of_tenant(tenant_of(request))
    return page([(record.id, shown(record, Batch)) for record in records], query)


@router.get("/v1/batches/{batch_id}", **documented(answer=Batch, errors=READ_ERRORS))
async def get_batch(request: Request, batch_id: str) -> Response:
    """One batch."""
    no_query(request)
    return json_response(shown(service_of(request).get(tenant_of(request), batch_id), Batch))


@router.post("/v1/batches/{batch_id}/cancel", **documented(answer=Batch, errors=CHANGE_ERRORS))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancels a batch: lines that run are stopped, and the answers so far are kept."""
    no_query(request)
    with disk_errors():
        record = await service_of(request).cancel(tenant_of(request), batch_id)
    return json_response(shown(record, Batch))
