"""Every field of files and batches: what it changes, and that OpenAI's client sends no other."""

from __future__ import annotations

import json
from typing import get_args, get_type_hints

import httpx
import pytest
from batch_clients import CHAT, create, end_of, line, results, upload
from openai.types import batch_create_params, batch_list_params, file_create_params, file_list_params

from plait.runtime.server.batches.records import Endpoint
from plait.runtime.server.protocols.batches.batches import BatchQuery, CreateBatch, ExpiresAfter
from plait.runtime.server.protocols.batches.files import FileQuery, FileUpload

STRUCTS = [
    (CreateBatch, batch_create_params.BatchCreateParams),
    (ExpiresAfter, batch_create_params.OutputExpiresAfter),
    (ExpiresAfter, file_create_params.ExpiresAfter),
    (FileUpload, file_create_params.FileCreateParams),
    (FileQuery, file_list_params.FileListParams),
    (BatchQuery, batch_list_params.BatchListParams),
]


@pytest.mark.parametrize(("struct", "params"), STRUCTS, ids=lambda kind: kind.__name__)
def test_fields_are_those_of_the_client(struct, params) -> None:
    assert set(struct.__struct_fields__) == set(params.__annotations__)


def test_endpoints_are_the_clients_that_the_server_has() -> None:
    known = set(get_args(get_type_hints(batch_create_params.BatchCreateParams)["endpoint"]))
    missing = {"/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/videos"}
    assert set(get_args(Endpoint)) == known - missing


def test_the_endpoint_decides_which_lines_fit(client) -> None:
    items = [line("a", CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=1)]
    assert end_of(client, create(client, items, CHAT)).status == "completed"
    assert end_of(client, create(client, items, "/v1/completions")).errors.data[0].code == "url_mismatch"


def test_lines_refuse_what_requests_only_list(client) -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    items = [line("unknown", CHAT, **ask, xyzzy=1), line("advice", CHAT, **ask, store=True), line("good", CHAT, **ask)]
    output, errors = results(client, end_of(client, create(client, items, CHAT)))
    assert set(output) == {"good"} and set(errors) == {"unknown", "advice"}
    for name, code, param in (
        ("unknown", "unknown_parameter", "xyzzy"),
        ("advice", "unsupported_parameter", "store"),
    ):
        error = errors[name]["response"]["body"]["error"]
        assert (error["code"], error["param"]) == (code, param)


def test_fields_of_a_batch_are_in_the_answer(client) -> None:
    file = upload(client, [line("a", CHAT, messages=[])])
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"project": "x"}
    )
    assert (batch.input_file_id, batch.endpoint, batch.completion_window) == (file.id, CHAT, "24h")
    assert batch.metadata == {"project": "x"} and batch.object == "batch" and batch.model
    assert batch.expires_at - batch.created_at == 86_400
    end_of(client, batch)


def test_the_openapi_document_has_forms_queries_and_contents(http) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths["/v1/files"]["post"]["requestBody"]["content"]) == {"multipart/form-data"}
    names = [parameter["name"] for parameter in paths["/v1/files"]["get"]["parameters"]]
    assert names == ["after", "limit", "order", "purpose"]
    content = paths["/v1/files/{file_id}/content"]["get"]
    assert set(content["responses"]["200"]["content"]) == {"application/octet-stream"}
    assert "409" in paths["/v1/batches/{batch_id}/cancel"]["post"]["responses"]
    assert "507" in paths["/v1/files"]["post"]["responses"]


def test_a_body_of_another_type_is_refused(address) -> None:
    answer = httpx.post(f"{address}/v1/batches", content=json.dumps({}), timeout=60)
    assert answer.status_code == 415
