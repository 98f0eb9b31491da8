"""A server on the embedded model for client packages that the tests do not install; `make clients` does.

The tests run in an environment without torch; `PLAIT_SERVER` is the interpreter of the one that can serve.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """`http://127.0.0.1:PORT` of a running server with deterministic answers."""
    command = [os.environ["PLAIT_SERVER"], "-P", "-m", "plait.cli", "serve", "--port", "0", "--deterministic"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    first_line = process.stdout.readline()
    assert first_line.startswith("plait serves at http://127.0.0.1:"), first_line
    yield first_line.split()[-1]
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()
