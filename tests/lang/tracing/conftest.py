"""Fixtures of the tests of `compile()`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_runtime(monkeypatch):
    """Fails a test that starts the embedded runtime: `compile()` needs no model."""
    import plait.lang.backends.default_backend as backends

    def refuse():
        raise AssertionError("compiling started a runtime")

    monkeypatch.setattr(backends, "_start_embedded", refuse)
