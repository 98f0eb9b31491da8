"""Requests generated from the OpenAPI document: no response is a 500, and all are documented.

PLAIT_EXAMPLES sets the number of examples per operation; `make schemathesis` tries many.
"""

from __future__ import annotations

import os

import httpx
import pytest
import schemathesis
from asgi_server import serve_app
from error_bodies import check_error_body
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from plait.runtime.process.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

EXAMPLES = int(os.environ.get("PLAIT_EXAMPLES", "4"))
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
OWN_TIMEOUT = 504  # the request's own, a documented answer


@pytest.fixture(scope="module")
def schema(small_model, tmp_path_factory):
    """The schema of a server with a short context, so that answers are short."""
    with (
        Engine(small_model, context_length=96, max_pages=4000, compile_deadline_s=60) as engine,
        serve_app(_app(engine, tmp_path_factory.mktemp("files"))) as address,
    ):
        document = httpx.get(f"{address}/openapi.json", timeout=60).json()
        yield _load(document, address)
        assert httpx.get(f"{address}/health", timeout=60).status_code == 200
        assert engine.client.status().used_pages == 0


def _app(engine, files_dir):
    return create_app(engine, server_settings(model_name="default", files_dir=str(files_dir)))


def _load(document, address):
    """Fixes `model` to the served one, since most requests would get 404 otherwise."""
    for component in document["components"]["schemas"].values():
        is_request = "additionalProperties" in component
        if is_request and "model" in component.get("properties", {}):
            component["properties"]["model"] = {"const": "default"}
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=address)
    return schema


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_responses_are_documented_and_none_is_a_server_error(schema, mode) -> None:
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # has nothing that could be invalid
        _try(operation, mode)


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "stream": True}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "stream": True}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "stream": True}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4, "stream": True}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 4}, "stream": True}),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 4}}),
    ],
)
def test_streams_are_documented(schema, path, body) -> None:
    case = schema[path]["POST"].Case(body={"model": "default", **body}, media_type="application/json")
    answer = case.call(timeout=60)
    assert answer.status_code == 200
    case.validate_response(answer, checks=CHECKS)


def _try(operation, mode) -> None:
    cases = operation.as_strategy(generation_mode=mode)

    @given(data=st.data())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(data) -> None:
        try:
            case = data.draw(cases)
        except InvalidSchema:  # a mutation of the schema that no value satisfies
            reject()
        answer = case.call(timeout=60)
        if answer.status_code != OWN_TIMEOUT:
            case.validate_response(answer, checks=[not_a_server_error])
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            check_error_body(operation.path, answer.json())

    ask()
