"""Files of caches are opened at once or not at all, whatever lies in their place."""

from __future__ import annotations

import os
from pathlib import Path

import odd_files
import pytest

from plait.host.private_file import OddFile, open_private

pytestmark = pytest.mark.timeout(20)  # a FIFO that is waited for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY])
@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_what_is_no_private_file_is_not_opened(folder, kind, flags) -> None:
    odd_files.put(kind, folder / "name", b"content")
    before = os.lstat(folder / "name")
    with pytest.raises(OddFile, match="no regular file"):
        open_private(folder / "name", flags)
    assert os.lstat(folder / "name") == before


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_a_file_that_is_made_replaces_what_is_none(folder, kind) -> None:
    odd_files.put(kind, folder / "name", b"content")
    if kind == "folder":
        with pytest.raises(OSError, match=r"[Dd]irectory|permitted"):
            open_private(folder / "name", os.O_RDWR | os.O_CREAT)
        return
    fd = open_private(folder / "name", os.O_RDWR | os.O_CREAT)
    assert os.fstat(fd).st_mode & 0o777 == 0o600 and os.read(fd, 10) == b""
    os.close(fd)
    assert (folder / "name").is_file() and not (folder / "name").is_symlink()
    if kind == "link to a file":
        assert (folder.parent / "target-name").read_bytes() == b"content"


def test_a_private_file_is_opened_also_relative_to_a_folder(folder) -> None:
    (folder / "name").write_bytes(b"content")
    folder_fd = os.open(folder, os.O_DIRECTORY)
    for fd in (open_private(folder / "name"), open_private("name", folder_fd=folder_fd)):
        assert os.read(fd, 10) == b"content"
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        open_private("missing", folder_fd=folder_fd)
    os.close(folder_fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="2026-11-27: only root can give a file to another user")
def test_a_file_of_another_user_is_not_opened(folder) -> None:
    (folder / "name").write_bytes(b"content")
    os.chown(folder / "name", 12345, -1)
    with pytest.raises(OddFile):
        open_private(folder / "name")
