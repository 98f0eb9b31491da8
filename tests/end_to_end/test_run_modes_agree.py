"""A straight-line program gives the same variables however it is run, with a model."""

from __future__ import annotations

import httpx
import pytest
from asgi_server import serve_app
from hypothesis import HealthCheck, example, given, settings
from straight_line_programs import check_all_run_modes, programs

from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

ONE_EACH = httpx.Limits(max_keepalive_connections=0)  # the server closes idle connections, and may while one is taken


@pytest.fixture(scope="module")
def server(exact):
    with (
        serve_app(create_app(exact, server_settings())) as address,
        httpx.Client(base_url=address, timeout=60, limits=ONE_EACH) as client,
    ):
        yield client


RICH = [
    ("text", "Say: "),
    ("turn", "u", [("arg",), ("text", " is")]),
    ("turn", "s", [("gen", "a", {"regex": "[a-c]{1,2}"}), ("select", "d", ["good", "bad", "so so"])]),
    ("fork", "gather_variable", [[("gen", "b", {"n": 2})], [("value", "a", []), ("gen", "b", {"stop": [" a"]})]]),
    ("value", "b", [0, 1]),
    ("value", "b", [1]),
    ("gen", "last", {}),
]


@settings(max_examples=1, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@example(steps=RICH)
@given(steps=programs(2))
def test_any_straight_line_program_gives_the_same_however_it_is_run(exact, server, steps):
    check_all_run_modes(steps, exact, server, temperature=0, max_tokens=1)
