"""Where adapters that are loaded over HTTP lie, on a disk that does not answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from plait.runtime.errors import QueueTimeout
from plait.runtime.server.errors import ApiError
from plait.runtime.server.protocols.operations import adapters


def test_a_disk_that_hangs_fails_the_request_and_blocks_no_other(tmp_path, monkeypatch):
    """The loop goes on while the thread hangs: it ends the wait."""
    hung, turns = threading.Event(), []

    def hang(directory, name):
        hung.wait(60)
        return directory

    async def load():
        turning = asyncio.ensure_future(turn())
        try:
            await adapters.find_below(tmp_path, "mine")
        finally:
            turning.cancel()

    async def turn():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    monkeypatch.setattr(adapters, "path_below", hang)
    monkeypatch.setattr(adapters, "FIND_DEADLINE_S", 0.05)
    with pytest.raises(QueueTimeout, match=r"'mine' could not be read within 0\.05 s"):
        asyncio.run(load())
    assert len(turns) > 1
    hung.set()


def test_what_is_found_and_what_is_not(tmp_path):
    (tmp_path / "mine").mkdir()
    assert asyncio.run(adapters.find_below(tmp_path, "mine")) == (tmp_path / "mine").resolve()
    with pytest.raises(ApiError) as missing:
        asyncio.run(adapters.find_below(tmp_path, "other"))
    assert missing.value.status == 404
