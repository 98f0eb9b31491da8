"""Fixtures of the server tests: two `plait serve` processes, and an engine in this process.

Most tests use `address`, a server with a small model of random weights, since they hold for any model. Tests whose
answers must be meaningful, or must not end by themselves, use the embedded model at `real_address`. Both servers are
deterministic, so that a request's answer does not depend on the tests before it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import httpx
import openai
import pytest
from asgi_server import serve_app
from waiting import wait_until

import plait
from plait.runtime.process.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.http.connection_limits import make_http_protocol
from plait.runtime.server.settings import server_settings


@contextlib.contextmanager
def served(*model):
    """Runs `plait serve` for the block. Yields its address."""
    command = [sys.executable, "-P", "-m", "plait.cli", "serve", *map(str, model), "--port", "0"]
    command += ["--deterministic", "--compile-deadline", "60"]  # compiling is slow on a busy machine
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("plait serves at http://127.0.0.1:"), line
    try:
        yield line.split()[-1]
    finally:
        process.terminate()
        exit_code = process.wait(60)
        process.stdout.close()
    assert exit_code == 0


def openai_client(address, kind=openai.OpenAI):
    return kind(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def address(small_model, tmp_path_factory):
    with served(small_model, "--files-dir", tmp_path_factory.mktemp("files")) as address:
        yield address


@pytest.fixture(scope="session")
def real_address(tmp_path_factory):
    with served("--files-dir", tmp_path_factory.mktemp("files")) as address:
        yield address


@pytest.fixture(scope="module")
def endpoint(real_address):
    """The language's backend for the embedded model."""
    backend = plait.RuntimeEndpoint(real_address)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def client(address):
    return openai_client(address)


@pytest.fixture(scope="session")
def smollm(real_address):
    """OpenAI's client of the embedded model."""
    return openai_client(real_address)


@pytest.fixture
def aclient(address):
    return openai_client(address, openai.AsyncOpenAI)


@pytest.fixture(scope="session")
def http(address):
    """One client for all tests, with its connections."""
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def engine():
    with Engine(max_pages=6000, check_integrity=True, compile_deadline_s=60) as running:
        yield running


@pytest.fixture
def serve(engine):
    """`serve(**settings)` starts a server in this process and returns its address and AppState."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            settings = server_settings(**settings)
            app = create_app(engine, settings)
            http = make_http_protocol(settings.idle_timeout_s, settings.write_timeout_s)
            return stack.enter_context(serve_app(app, http, settings.idle_timeout_s)), app.state.plait

        yield start


@pytest.fixture
def idle(engine):
    """Waits until no call runs and no page is held, before and after the test."""

    def is_idle():
        status = engine.client.status()
        return (status.running_calls, status.waiting_calls, status.used_pages) == (0, 0, 0)

    assert wait_until(is_idle)
    yield
    assert wait_until(is_idle)
