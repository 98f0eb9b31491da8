"""A server of the embedded model, from the environment that plait is installed in, for clients that live in another.

`make clients` runs these; PLAIT names the command. Nothing here may import plait: it is not installed beside them.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from pydantic import BaseModel, Field

for name in ("LANGCHAIN_TRACING_V2", "LANGSMITH_TRACING"):
    os.environ[name] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else importing it asks the network


class Person(BaseModel):
    """A person who is mentioned."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="session")
def address():
    yield from served()


@pytest.fixture(scope="session")
def known_url():
    """Of a server whose model has a name that clients know."""
    for address in served("--model-name", "gpt-4o-mini"):
        yield f"{address}/v1"


def served(*flags):
    """Deterministic, since answers asked for twice are compared: the second finds its prompt in the cache."""
    fixed = ("--port", "0", "--compile-deadline", "60", "--deterministic")
    command = [os.environ.get("PLAIT", "plait"), "serve", *fixed, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = process.stdout.readline()
    assert said.startswith("plait serves at http://127.0.0.1:"), said
    yield said.split()[-1]
    process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()


@pytest.fixture(scope="session")
def base_url(address):
    return f"{address}/v1"


@pytest.fixture(scope="session")
def person():
    """The model that answers are to fit."""
    return Person
