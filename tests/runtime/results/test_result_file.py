"""A result file: what a kill, a full disk and other programs leave of it, and what it never touches."""

from __future__ import annotations

import errno
import json
import os

import pytest

from plait.runtime.results import result_file
from plait.runtime.results.result_file import NotAResult, ResultFile

START = b'{"n": '


def opened(path, **options):
    """(the file, the numbers of its lines)."""
    found = []

    def take(line: bytes) -> None:
        found.append(json.loads(line)["n"])

    return ResultFile(path, take, START, **options), found


def row(number) -> bytes:
    return b'{"n": %d}\n' % number


@pytest.mark.parametrize("is_durable", [False, True])
def test_lines_are_appended_and_read_again(tmp_path, is_durable) -> None:
    path = tmp_path / "out"
    file, _ = opened(path, is_durable=is_durable)
    assert not path.exists()
    file.begin()
    assert path.read_bytes() == b"" and (path.stat().st_mode & 0o077 == 0) == is_durable
    file.append(row(1) + row(2))
    file.append(row(3))
    assert file.size == path.stat().st_size
    assert opened(path)[1] == [1, 2, 3]


def test_every_part_of_a_last_line_is_cut_off_and_a_whole_one_is_kept(tmp_path) -> None:
    path = tmp_path / "out"
    for length in range(len(row(2)) + 1):
        path.write_bytes(row(1) + row(2)[:length])
        file, found = opened(path)
        assert path.read_bytes() == row(1) + row(2)[:length], "reading changes nothing"
        is_whole = length >= len(row(2)) - 1
        assert found == [1, 2][: 1 + is_whole]
        file.append(row(3))
        assert path.read_bytes() == row(1) + row(2) * is_whole + row(3)


@pytest.mark.parametrize(
    ("content", "number"),
    [(b"text", 1), (b"\n", 1), (row(1) + b"text", 2), (b'{"n": 1\n' + row(2), 1), (b'{"m": 1}', 1), (b"{\n", 1)],
)
def test_a_file_of_another_program_is_refused_and_not_touched(tmp_path, content, number) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises((NotAResult, KeyError)) as refused:
        opened(path)
    assert path.read_bytes() == content
    assert isinstance(refused.value, KeyError) or refused.value.number == number


def test_a_pipe_and_a_folder_are_refused_at_once(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match=r"regular file|directory"):
            opened(path)


def test_a_file_that_is_replaced_meanwhile_is_not_written_to(tmp_path) -> None:
    path = tmp_path / "out"
    file, _ = opened(path)
    file.append(row(1))
    path.unlink()
    path.write_text("a text")
    for write in (lambda: file.append(row(2)), lambda: file.append(row(2)), lambda: file.rewrite([row(3)])):
        with pytest.raises(OSError, match="another program has replaced"):
            write()
    assert path.read_text() == "a text"
    path.unlink()
    for number in (4, 5):
        file.append(row(number))
    assert path.read_bytes() == row(4) + row(5) and file.size == path.stat().st_size


def test_a_write_that_fails_leaves_nothing_of_its_lines(tmp_path, monkeypatch) -> None:
    path, real = tmp_path / "out", result_file.write_all
    file, _ = opened(path)
    file.append(row(1))
    can_truncate = True

    class Os:
        def __getattr__(self, name):
            return getattr(os, name)

        def ftruncate(self, descriptor, size):
            if not can_truncate:
                raise OSError(errno.EIO, "no")
            os.ftruncate(descriptor, size)

    def write_a_part(descriptor, data):
        os.write(descriptor, data[:4])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(result_file, "os", Os())
    for can_truncate in (True, False):
        monkeypatch.setattr(result_file, "write_all", write_a_part)
        with pytest.raises(OSError, match=r"full|no"):
            file.append(row(2))
        can_truncate = True
        monkeypatch.setattr(result_file, "write_all", real)
        size = file.size
        file.append(row(3))
        assert path.stat().st_size == size + len(row(3)) == file.size
    assert path.read_bytes() == row(1) + row(3) * 2


def test_lines_are_replaced_as_a_whole(tmp_path, monkeypatch) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    file, _ = opened(link)
    file.append(row(2) + row(1))
    path.chmod(0o640)
    (tmp_path / "link.part").write_text("mine")
    file.rewrite([row(1), row(2)])
    file.append(row(3))
    assert opened(path)[1] == [1, 2, 3] and link.is_symlink() and path.stat().st_mode & 0o777 == 0o640

    def fail(source, target):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        file.rewrite([row(9)])
    assert opened(path)[1] == [1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "link", "link.part"}
    file.remove()
    file.remove()
