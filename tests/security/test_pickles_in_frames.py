"""Pickles sent where other runtimes unpickle: a frame of messages, a result of a compile worker, a model folder."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from plait.constrained.compile_service.frame_connection import FrameConnection
from plait.runtime.errors import PlaitError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.transport.frames import build_frame, decode_client_frame, decode_server_frame


def pickle_that_creates(path: Path) -> bytes:
    """A pickle (protocol 0) that calls `os.mkdir(path)` when it is loaded."""
    return b"cposix\nmkdir\n(S'" + str(path).encode() + b"'\ntR."


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "created-by-a-pickle"


def test_a_client_frame(marker: Path) -> None:
    payload = pickle_that_creates(marker)
    for frame in (payload, build_frame([payload]), build_frame([msgspec.msgpack.encode(payload)])):
        assert decode_client_frame(frame).num_invalid == 1
    assert not marker.exists()


def test_a_frame_of_the_runtime(marker: Path) -> None:
    payload = pickle_that_creates(marker)
    for frame in (payload, build_frame([payload])):
        with pytest.raises(msgspec.DecodeError):
            decode_server_frame(frame)
    assert not marker.exists()


def test_a_result_of_a_compile_worker(marker: Path) -> None:
    payload = pickle_that_creates(marker)
    ours, theirs = socket.socketpair()
    with theirs:
        connection = FrameConnection(ours)
        theirs.sendall(len(payload).to_bytes(4, "little") + payload)
        assert connection.receive() == [] and connection.is_dead
        connection.close()
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.pkl"])
def test_weights(tmp_path: Path, marker: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / name).write_bytes(pickle_that_creates(marker))
    with pytest.raises(PlaitError):
        locate_model(str(folder))
    with pytest.raises(PlaitError):
        locate_model(str(folder / name))
    assert not marker.exists()
