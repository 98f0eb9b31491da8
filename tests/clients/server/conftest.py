"""A server of the embedded model for client packages, which are installed in an environment without plait.

`make clients` runs these tests; PLAIT names the command of the server. Nothing here may import plait.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from pydantic import BaseModel, Field

for name in ("LANGCHAIN_TRACING_V2", "LANGSMITH_TRACING"):
    os.environ[name] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # otherwise its import sends a request


class Person(BaseModel):
    """A person who is mentioned."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="session")
def address():
    yield from served()


@pytest.fixture(scope="session")
def known_url():
    """Base URL of a server whose model has a name that clients know."""
    for address in served("--model-name", "gpt-4o-mini"):
        yield f"{address}/v1"


def served(*flags):
    """Runs a server; yields its address. Deterministic, so that repeated answers are equal with a cached prompt."""
    common_flags = ("--port", "0", "--compile-deadline", "60", "--deterministic")
    command = [os.environ.get("PLAIT", "plait"), "serve", *common_flags, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first_line = process.stdout.readline()
    assert first_line.startswith("plait serves at http://127.0.0.1:"), first_line
    yield first_line.split()[-1]
    process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()


@pytest.fixture(scope="session")
def base_url(address):
    return f"{address}/v1"


@pytest.fixture(scope="session")
def person():
    """The Pydantic model of structured answers."""
    return Person
