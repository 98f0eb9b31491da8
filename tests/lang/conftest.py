"""Fixtures of the language's tests: a scripted backend, made the default one for the time of a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted import ScriptedBackend

import plait


@pytest.fixture
def backend() -> Iterator[ScriptedBackend]:
    """A fresh scripted backend; programs run without `backend=` use it."""
    scripted = ScriptedBackend()
    plait.set_default_backend(scripted)
    yield scripted
    plait.set_default_backend(None)
