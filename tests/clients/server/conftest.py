"""A server of the embedded model for client packages, which are installed in an environment without plait.

`make clients` runs these tests; PLAIT names the command of the server. Nothing here may import plait.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

# What these clients would send elsewhere.
for name in ("LANGCHAIN_TRACING_V2", "LANGSMITH_TRACING"):
    os.environ[name] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # otherwise its import sends a request
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OPENAI_API_KEY"] = "none"

PLAIT = os.environ.get("PLAIT", "plait")
FIND_MODEL = "from plait.runtime.model_files.locate import locate_model; print(locate_model())"


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
    command = [PLAIT, "serve", *common_flags, *flags]
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
def embedder(tmp_path_factory):
    """Address of a server whose model computes embeddings of 576 numbers."""
    python = Path(PLAIT).with_name("python")
    found = subprocess.run([python, "-P", "-c", FIND_MODEL], capture_output=True, text=True, check=True)
    path = tmp_path_factory.mktemp("models") / "embedder.gguf"
    path.write_bytes(with_mean_pooling(Path(found.stdout.strip()).read_bytes()))
    yield from served(str(path))


def with_mean_pooling(gguf):
    """The bytes of a GGUF file of a Llama model, which then computes embeddings.

    Two entries of together 64 bytes precede the others, so that the tensors stay aligned: the pooling (type 4, uint32)
    and a text (type 8). Source of the layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    header = struct.Struct("<4sIQQ")
    magic, version, num_tensors, num_entries = header.unpack_from(gguf)
    key = b"llama.pooling_type"
    entries = struct.pack(f"<Q{len(key)}sII", len(key), key, 4, 1) + struct.pack(
        "<Q7sIQ3s", 7, b"padding", 8, 3, b"..."
    )
    assert magic == b"GGUF" and len(entries) == 64
    return header.pack(magic, version, num_tensors, num_entries + 2) + entries + gguf[header.size :]


@pytest.fixture(scope="session")
def person():
    """The Pydantic model of structured answers."""
    return Person
