"""The directory of a runtime: its place, where the path of the temporary folder is long."""

from __future__ import annotations

import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from plait.runtime.process.runtime import Runtime
from plait.runtime.process.runtime_directory import LONGEST_NAME, make_runtime_directory
from plait.runtime.transport.zmq_server import FRAMES_SOCKET, LIFELINE_SOCKET


def test_its_sockets_can_be_bound_however_long_the_temporary_folder_is(tmp_path, monkeypatch):
    folders = [tmp_path, tmp_path / ("é" * (60 - len(tmp_path.name))), tmp_path / ("f" * 200)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        path = Path(make_runtime_directory())
        try:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700 and path.name.startswith("plait-")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path / LIFELINE_SOCKET))
            (path / LIFELINE_SOCKET).unlink()
        finally:
            path.rmdir()
    assert path.parent == Path("/tmp") and not os.listdir(folders[-1])


def test_a_start_without_a_process_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        Runtime(progress=False)
    assert not os.listdir(tmp_path)


def test_the_longest_name_is_that_of_a_socket():
    assert max(FRAMES_SOCKET, LIFELINE_SOCKET, key=len) == LONGEST_NAME
