"""Two server processes for all tests of this folder, started as a user starts them, and an engine in this process.

Most tests ask the small model of random weights, `address`: what they check is the same for any model. Those whose
answers must mean something, or must not end by themselves, ask the embedded one, `real_address`. Both servers are
deterministic, so that the same request gives the same answer whatever else was asked before.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import httpx
import openai
import pytest
from asgi_server import serve_app
from tiny_llama_gguf import write_small_model

from plait.runtime.process.engine import Engine
from plait.runtime.server.app import create_app
from plait.runtime.server.http.connection_timeouts import make_http_protocol
from plait.runtime.server.settings import server_settings


@contextlib.contextmanager
def served(*model):
    """`http://127.0.0.1:PORT` of a server that runs."""
    command = [sys.executable, "-P", "-m", "plait.cli", "serve", *map(str, model), "--port", "0"]
    command += ["--deterministic", "--compile-deadline", "60"]  # a busy machine compiles slowly
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = process.stdout.readline()
    assert said.startswith("plait serves at http://127.0.0.1:"), said
    try:
        yield said.split()[-1]
    finally:
        process.terminate()
        code = process.wait(60)
        process.stdout.close()
    assert code == 0


def openai_client(address, kind=openai.OpenAI):
    return kind(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "small.gguf")


@pytest.fixture(scope="session")
def address(small_model):
    with served(small_model) as at:
        yield at


@pytest.fixture(scope="session")
def real_address():
    with served() as at:
        yield at


@pytest.fixture(scope="session")
def client(address):
    return openai_client(address)


@pytest.fixture(scope="session")
def smollm(real_address):
    """OpenAI's client on the embedded model."""
    return openai_client(real_address)


@pytest.fixture
def aclient(address):
    return openai_client(address, openai.AsyncOpenAI)


@pytest.fixture(scope="session")
def http(address):
    """One plain client, since each new one reads the system's certificates again."""
    with httpx.Client(base_url=address, timeout=60) as plain:
        yield plain


@pytest.fixture(scope="session")
def engine():
    with Engine(max_pages=6000, check_integrity=True, compile_deadline_s=60) as running:
        yield running


@pytest.fixture
def serve(engine):
    """`serve(**settings)` gives a server's address and its state; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            settings = server_settings(**settings)
            app = create_app(engine, settings)
            http = make_http_protocol(settings.idle_timeout_s, settings.write_timeout_s)
            return stack.enter_context(serve_app(app, http)), app.state.plait

        yield start


@pytest.fixture
def idle(engine):
    """Before and after: nothing runs and no page is held."""
    assert engine.client.status().held_pages == 0
    yield
    status = engine.client.status()
    assert (status.running_calls, status.waiting_calls, status.held_pages) == (0, 0, 0)
