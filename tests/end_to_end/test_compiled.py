"""A straight-line program gives the same variables however it is run, with a model."""

from __future__ import annotations

import httpx
import pytest
from hosting import hosted
from hypothesis import HealthCheck, given, settings
from straight_programs import check_all_ways, programs

from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

ONE_EACH = httpx.Limits(max_keepalive_connections=0)  # the server closes idle connections, and may while one is taken


@pytest.fixture(scope="module")
def server(exact):
    with (
        hosted(create_app(exact, server_settings())) as address,
        httpx.Client(base_url=address, timeout=60, limits=ONE_EACH) as client,
    ):
        yield client


@settings(max_examples=2, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(steps=programs(2))
def test_any_straight_line_program_gives_the_same_however_it_is_run(exact, server, steps):
    check_all_ways(steps, exact, server, temperature=0, max_tokens=1)
