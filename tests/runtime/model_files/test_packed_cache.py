"""The folder of packed weights: its limit, its owner, several processes, full disks, models that change."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys

import msgspec
import numpy as np
import odd_files
import pytest

from plait.runtime.model_files import packed_cache
from plait.runtime.model_files.array_file import CHUNK, DamagedFile
from plait.runtime.model_files.packed_cache import CacheHeader, Source, UnusableFolder

SIZE = 40 * CHUNK


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PLAIT_PACKED_CACHE_GB", raising=False)


def model(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(name.encode() * 1000)
    return path


def header_of(path):
    key = packed_cache.model_key([path], ["test"])
    return CacheHeader(key, [Source.of(path)], msgspec.Raw(b"[]"))


def store(path, size=SIZE):
    """Stores a file of `size` bytes for a model; returns its key."""
    header = header_of(path)
    assert packed_cache.store(header, [np.full(size, 7, np.uint8)])
    return header.key


def set_limit(monkeypatch, num_bytes):
    monkeypatch.setenv("PLAIT_PACKED_CACHE_GB", f"{num_bytes / 1e9:.12f}")


def test_a_stored_file_is_found(tmp_path):
    assert packed_cache.load("0" * 64) is None
    key = store(model(tmp_path, "a"))
    mapped, header = packed_cache.load(key)
    assert header.key == key and mapped.data[:SIZE].tobytes() == b"\7" * SIZE
    assert packed_cache.path_of(key).stat().st_mode & 0o077 == 0 == packed_cache.folder().stat().st_mode & 0o077


def test_the_least_recently_used_files_go_first(tmp_path, monkeypatch):
    set_limit(monkeypatch, 2.5 * SIZE)
    models = [model(tmp_path, name) for name in "abc"]
    first, second = store(models[0]), store(models[1])
    for age, key in ((200, first), (100, second)):
        then = packed_cache.path_of(key).stat().st_mtime - age
        os.utime(packed_cache.path_of(key), (then, then))
    assert packed_cache.load(first)  # used now, so the second one is older
    third = store(models[2])
    assert packed_cache.load(second) is None
    assert packed_cache.load(first) and packed_cache.load(third)


def test_a_file_larger_than_the_limit_is_not_written(tmp_path, monkeypatch):
    kept = store(model(tmp_path, "a"))
    set_limit(monkeypatch, 2 * SIZE)
    assert not packed_cache.store(header_of(model(tmp_path, "b")), [np.zeros(3 * SIZE, np.uint8)])
    assert packed_cache.load(kept)  # and nothing was removed for it


@pytest.mark.parametrize("text", ["many", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_an_error(text, monkeypatch):
    monkeypatch.setenv("PLAIT_PACKED_CACHE_GB", text)
    with pytest.raises(UnusableFolder, match="PLAIT_PACKED_CACHE_GB"):
        packed_cache.limit_bytes()


def test_files_of_changed_and_removed_models_go(tmp_path):
    changed, removed = model(tmp_path, "changed"), model(tmp_path, "removed")
    old_keys = store(changed), store(removed)
    os.utime(changed, ns=(1, 1))
    removed.unlink()
    new_key = store(changed)
    assert new_key not in old_keys and packed_cache.load(new_key)
    assert [packed_cache.load(key) for key in old_keys] == [None, None]


def test_a_model_that_changed_while_it_was_packed_is_not_stored(tmp_path):
    path = model(tmp_path, "a")
    header = header_of(path)
    path.write_bytes(b"other")
    assert not packed_cache.store(header, [np.zeros(SIZE, np.uint8)])


def test_a_changed_byte_with_the_same_time_changes_the_key(tmp_path):
    path = model(tmp_path, "a")
    before, status = packed_cache.model_key([path], []), path.stat()
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert packed_cache.model_key([path], []) != before
    assert packed_cache.model_key([path], ["x"]) != packed_cache.model_key([path], ["y"])


def test_the_key_does_not_depend_on_the_path(tmp_path):
    path = model(tmp_path, "a")
    before = packed_cache.model_key([path], [])
    assert packed_cache.model_key([path.rename(tmp_path / "b")], []) == before


def test_a_folder_that_others_may_write_is_not_used(tmp_path):
    key = store(model(tmp_path, "a"))
    packed_cache.folder().chmod(0o777)
    with pytest.raises(UnusableFolder, match="others may write"):
        packed_cache.load(key)
    with pytest.raises(UnusableFolder, match="others may write"):
        packed_cache.store(header_of(model(tmp_path, "b")), [np.zeros(SIZE, np.uint8)])


@pytest.mark.skipif(os.geteuid() != 0, reason="2026-11-23: only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(tmp_path):
    key = store(model(tmp_path, "a"))
    os.chown(packed_cache.folder(), 12345, -1)
    with pytest.raises(UnusableFolder, match="another user"):
        packed_cache.load(key)


@pytest.mark.timeout(20)  # a FIFO that is waited for
@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_what_is_no_private_file_is_damaged_and_written_again(tmp_path, kind):
    path = model(tmp_path, "a")
    place = packed_cache.path_of(store(path))
    content = place.read_bytes()
    place.unlink()
    odd_files.put(kind, place, content)
    with pytest.raises(DamagedFile, match="no regular file"):
        packed_cache.load(header_of(path).key)
    packed_cache.remove(header_of(path).key)
    if kind == "folder":
        with pytest.raises(UnusableFolder, match="Is a directory"):
            store(path)
    else:
        assert packed_cache.load(store(path))


@pytest.mark.timeout(20)  # a FIFO that is waited for
@pytest.mark.parametrize("suffix", [".weights", ".part"])
@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_odd_files_beside_it_stop_no_file(tmp_path, kind, suffix):
    path = model(tmp_path, "a")
    packed_cache.folder().mkdir(parents=True)
    odd_files.put(kind, packed_cache.folder() / f"0123{suffix}", b"content")
    assert packed_cache.load(store(path))
    assert [status.st_size for _, status in packed_cache.stored_files() if status.st_size < SIZE] == []


@pytest.mark.timeout(20)  # a FIFO that is waited for
@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_an_odd_unfinished_file_is_replaced(tmp_path, kind):
    path = model(tmp_path, "a")
    packed_cache.folder().mkdir(parents=True)
    odd_files.put(kind, packed_cache.path_of(header_of(path).key).with_suffix(".part"), b"content")
    if kind == "folder":
        with pytest.raises(UnusableFolder, match="cannot be written"):
            store(path)
    else:
        assert packed_cache.load(store(path))


def test_a_file_of_another_model_is_damaged(tmp_path):
    key, other = store(model(tmp_path, "a")), header_of(model(tmp_path, "b")).key
    packed_cache.path_of(key).rename(packed_cache.path_of(other))
    with pytest.raises(DamagedFile, match="another model"):
        packed_cache.load(other)


def test_one_process_writes_a_file_and_the_others_leave_it(tmp_path):
    header = header_of(model(tmp_path, "a"))
    packed_cache.folder().mkdir(parents=True)
    part = packed_cache.path_of(header.key).with_suffix(".part")
    with part.open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        assert not packed_cache.store(header, [np.zeros(SIZE, np.uint8)])
        assert not packed_cache.store(header, [np.zeros(SIZE, np.uint8)]) and part.exists()
        other = store(model(tmp_path, "b"))  # removes only what nobody writes
        assert part.exists()
    assert packed_cache.store(header, [np.zeros(SIZE, np.uint8)])  # the process has ended: its file is written again
    assert packed_cache.load(header.key) and packed_cache.load(other) and not part.exists()


def test_abandoned_files_are_removed(tmp_path):
    packed_cache.folder().mkdir(parents=True)
    abandoned = packed_cache.folder() / "0123.part"
    abandoned.write_bytes(b"x")
    store(model(tmp_path, "a"))
    assert not abandoned.exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UnusableFolder, match="cannot be written"):
        store(model(tmp_path, "a"))


def test_too_little_space_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_cache, "FREE_BYTES", 1 << 60)
    with pytest.raises(UnusableFolder, match="too little space"):
        store(model(tmp_path, "a"))
    assert not list(packed_cache.folder().iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path):
    """A limit on the size of files stands for a disk that fills up meanwhile."""
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; import pathlib, test_packed_cache as t\n"
        "t.resource.setrlimit(t.resource.RLIMIT_FSIZE, (t.SIZE // 2, t.SIZE // 2))\n"
        "try: t.store(pathlib.Path(sys.argv[1]))\n"
        "except t.UnusableFolder as error: print(error)"
    )
    folders = [os.path.dirname(file) for file in (__file__, odd_files.__file__)]
    command = [sys.executable, "-P", "-c", script, str(model(tmp_path, "a")), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "cannot be written (File too large)" in done.stdout
    assert not list(packed_cache.folder().iterdir())
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != SIZE // 2
