"""What a client without a key, or whose request fails, can learn: not the key by timing, nothing of the process."""

from __future__ import annotations

import hmac
import logging

import pytest

from plait.runtime.errors import CallFailed, RuntimeGone
from plait.runtime.server.errors import as_api_error
from plait.runtime.server.http.api_keys import digest, find_key_name

KEYS = {name: digest(name.encode()) for name in ("first", "second", "third")}
INSIDE = "<Tensor at 0x7f2a10> in /srv/models/secret.py, key sk-123"


@pytest.mark.parametrize("key", [b"first", b"third", b"none", b"", b"f", "schlüssel".encode()])
def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, key: bytes) -> None:
    """vLLM CVE-2025-59425: digests of equal length are compared, and all of them, whichever matches."""
    compared: list[tuple[str, str]] = []

    def compare_digest(left: str, right: str) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    assert find_key_name(key, KEYS) == (key.decode() if key.decode() in KEYS else None)
    assert compared == [(digest(key), known) for known in KEYS.values()]


@pytest.mark.parametrize(
    "error", [ValueError(INSIDE), AssertionError(INSIDE), CallFailed(INSIDE), RuntimeGone(INSIDE), MemoryError(INSIDE)]
)
def test_an_internal_error_tells_a_client_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM CVE-2026-22778: the text of an error had the address of an object."""
    with caplog.at_level(logging.ERROR):
        answer = as_api_error(error)
    assert answer.status >= 500
    assert not any(part in str(answer) + answer.message for part in ("0x7f", "Tensor", "/srv", "secret", "sk-123"))
    assert isinstance(error, RuntimeGone) or INSIDE in caplog.text, "the operator finds it in the log"
