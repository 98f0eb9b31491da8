"""A server on the embedded model for client packages that the tests do not install; `make clients` does.

These run in an environment of their own, without torch: `PLAIT_SERVER` is the interpreter that can serve.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """`http://127.0.0.1:PORT` of a server that runs, deterministic."""
    command = [os.environ["PLAIT_SERVER"], "-P", "-m", "plait.cli", "serve", "--port", "0", "--deterministic"]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said.startswith("plait serves at http://127.0.0.1:"), said
    yield said.split()[-1]
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()
