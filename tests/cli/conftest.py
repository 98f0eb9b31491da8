"""Fixtures of the command line's tests: a scripted default backend, and a machine without a model."""

from __future__ import annotations

import pytest
from scripted_scheduler import ScriptedBackend

import plait


@pytest.fixture
def backend():
    scripted = ScriptedBackend()
    plait.set_default_backend(scripted)
    yield scripted
    plait.set_default_backend(None)


@pytest.fixture
def no_model(monkeypatch):
    """Simulates a machine without an installed model and without a started runtime."""
    import plait.lang.backends.default_backend as backends
    from plait.runtime.model_files import locate

    monkeypatch.delenv("PLAIT_MODEL", raising=False)
    monkeypatch.setattr(locate, "EMBEDDED_PACKAGE", "no_such_package")
    monkeypatch.setattr(backends, "_embedded", None)
    monkeypatch.setattr(backends, "_embedded_settings", {})
    plait.set_default_backend(None)
