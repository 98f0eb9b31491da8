"""One engine and one runtime process on the embedded model, shared by the end-to-end tests."""

from __future__ import annotations

import pytest

from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.engine import Engine
from plait.runtime.process.runtime import Runtime


@pytest.fixture(scope="session")
def model_path():
    return locate_model()


@pytest.fixture(scope="session")
def exact():
    """A deterministic in-process engine with the default weights. It checks the page accounting after every step."""
    with Engine(deterministic=True, check_integrity=True, max_pages=6000, compile_deadline_s=60) as engine:
        yield engine


@pytest.fixture(scope="session")
def runtime():
    """A runtime process with default settings, except for the time to compile a grammar: the machine may be busy."""
    with Runtime(progress=False, compile_deadline_s=60) as runtime:
        yield runtime


@pytest.fixture
def starts_small_model(small_model, monkeypatch):
    """Runtimes that the test starts run a small model, which loads in half the time; the shared ones do not."""
    monkeypatch.setenv("PLAIT_MODEL", str(small_model))
