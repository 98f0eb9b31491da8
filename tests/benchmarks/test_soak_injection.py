"""The failures that a soak causes within the server: they are counted, and they begin when the soak does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from faults import soak

PROGRAM = """
import sitecustomize
from plait.runtime.log_writer import LogWriter
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.scheduler.token_mask import TokenMaskBuilder

sitecustomize.PROBABILITY.update(dict.fromkeys(sitecustomize.PROBABILITY, 1.0))
def failure(call, *arguments):
    try:
        call(*arguments)
    except sitecustomize.InjectedFault as error:
        return str(error)
    except AttributeError:  # the real function, without its arguments
        return "real"

print(failure(Sampler.sample, None, None, None, None), failure(TokenMaskBuilder.fill, None, None, None))
writer = LogWriter(1)
writer.put("line\\n")
writer.flush()
"""


def run(folder: Path) -> str:
    path = os.pathsep.join(filter(None, [str(soak.INJECTION), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PLAIT_FAULT_FOLDER": str(folder)}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout


def test_nothing_fails_before_the_soak_begins(tmp_path: Path) -> None:
    assert run(tmp_path).split() == ["real", "real", "line"]
    assert not list(tmp_path.iterdir())


def test_failures_are_raised_and_counted(tmp_path: Path) -> None:
    (tmp_path / "active").touch()
    assert run(tmp_path).split() == ["injected:", "sampler", "injected:", "mask"]
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir() if file.name != "active"} == {
        "sampler": 1,
        "mask": 1,
        "log": 1,
    }
