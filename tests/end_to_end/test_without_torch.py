"""A program on the embedded model where torch is not installed, in the program's process and in that of the runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
import plait
from plait import assistant, gen, select, user

try:
    plait.Runtime(weights="bf16")
except plait.InputError as error:
    refused = str(error)


@plait.function
def review(s):
    s += user("Great shoes.")
    s += assistant(gen("summary", max_tokens=4) + select("verdict", ["yes", "no"]) + gen("year", regex="[0-9]{4}"))
    for branch in (branches := s.fork(2)):
        branch += gen("person", json_schema={"type": "object", "properties": {"ok": {"type": "boolean"}}}, max_tokens=8)
    branches.join()


with plait.Runtime(max_pages=256) as runtime:
    state = review.run(temperature=0, backend=runtime)
    print(json.dumps([refused, state["verdict"], state["year"], len(state["person"])]))
"""


@pytest.fixture
def environment(tmp_path):
    """Python imports sitecustomize at its start, also in the runtime's process, and then finds no torch."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    blocked = "import sys\nsys.modules['torch'] = sys.modules['triton'] = None\n"
    (hooks / "sitecustomize.py").write_text(blocked)
    path = os.pathsep.join([str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def test_a_program_runs_without_torch(environment, tmp_path):
    command = [sys.executable, "-P", "-c", "import torch"]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 1
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-P", "-m", "plait.cli", "run", str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    refused, verdict, year, people = json.loads(done.stdout)
    assert refused.startswith("weights='bf16' needs torch. It is not installed: pip install 'plait[torch]'")
    assert verdict in ("yes", "no") and year.isdigit() and people == 2
