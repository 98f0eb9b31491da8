"""One server process on the embedded model for all tests of this folder, started as a user starts it.

It is deterministic, so that the same request gives the same answer whatever else was asked before.
"""

from __future__ import annotations

import subprocess
import sys

import openai
import pytest


@pytest.fixture(scope="session")
def address():
    """`http://127.0.0.1:PORT` of a server that runs."""
    command = [sys.executable, "-P", "-m", "plait.cli", "serve", "--port", "0", "--deterministic"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = process.stdout.readline()
    assert said.startswith("plait serves at http://127.0.0.1:"), said
    yield said.split()[-1]
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


@pytest.fixture(scope="session")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def aclient(address):
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
