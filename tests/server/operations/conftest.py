"""One engine in this process for all tests of this folder; each test has its own server in front of it."""

from __future__ import annotations

import pytest
from hosting import hosted

from plait.runtime.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.connections import patient_protocol
from plait.runtime.server.settings import server_settings


@pytest.fixture(scope="session")
def engine():
    with Engine(max_pages=6000, check_integrity=True, compile_deadline_s=60) as running:
        yield running


@pytest.fixture
def serve(engine):
    """`serve(**settings)` gives a server's address and its state; it ends with the test."""
    import contextlib

    with contextlib.ExitStack() as stack:

        def start(**settings):
            settings = server_settings(**settings)
            app = create_app(engine, settings)
            http = patient_protocol(settings.idle_timeout_s, settings.write_timeout_s)
            return stack.enter_context(hosted(app, http)), app.state.plait

        yield start


@pytest.fixture
def idle(engine):
    """Before and after: nothing runs and no page is held."""
    assert engine.client.status().held_pages == 0
    yield
    status = engine.client.status()
    assert (status.running_calls, status.waiting_calls, status.held_pages) == (0, 0, 0)
