"""A straight-line program on the embedded model gives the same variables in every run mode."""

from __future__ import annotations

import httpx
import pytest
from asgi_server import serve_app
from hypothesis import HealthCheck, example, given, settings
from straight_line_programs import check_all_run_modes, programs

from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

# The server closes idle connections, which may happen while a request takes one.
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture(scope="module")
def server(exact):
    with (
        serve_app(create_app(exact, server_settings())) as address,
        httpx.Client(base_url=address, timeout=60, limits=NO_KEEPALIVE) as client,
    ):
        yield client


PROGRAM_WITH_ALL_STEPS = [
    ("text", "Say: "),
    ("turn", "u", [("arg",), ("text", " is")]),
    ("turn", "s", [("gen", "a", {"regex": "[a-c]{1,2}"}), ("select", "d", ["good", "bad", "so so"])]),
    ("fork", "gather_variable", [[("gen", "b", {"n": 2})], [("value", "a", []), ("gen", "b", {"stop": [" a"]})]]),
    ("value", "b", [0, 1]),
    ("value", "b", [1]),
    ("gen", "last", {}),
]


@settings(max_examples=1, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@example(steps=PROGRAM_WITH_ALL_STEPS)
@given(steps=programs(2))
def test_straight_line_programs_give_the_same_variables_in_every_run_mode(exact, server, steps):
    check_all_run_modes(steps, exact, server, temperature=0, max_tokens=1)
