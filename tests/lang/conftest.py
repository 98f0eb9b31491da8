"""Fixtures of the language's tests: a scripted backend, made the default one for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_scheduler import ScriptedBackend

import plait


@pytest.fixture
def backend() -> Iterator[ScriptedBackend]:
    """A fresh scripted backend; programs run without `backend=` use it."""
    scripted = ScriptedBackend()
    plait.set_default_backend(scripted)
    yield scripted
    plait.set_default_backend(None)
