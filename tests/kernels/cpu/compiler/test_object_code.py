"""The cache of machine code: what is found again, and whose files are not read."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import odd_files
import pytest

from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.parallel import thread_pool


def answer(thread_id, threads, address):
    pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_KERNEL_CACHE_DIR", str(tmp_path))
    return object_code.cache_folder()


def test_the_folder_is_the_users_alone(folder) -> None:
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700


def test_the_folder_lies_in_the_users_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PLAIT_KERNEL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert object_code.cache_folder() == tmp_path / "plait" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert object_code.cache_folder() == tmp_path / "home" / ".cache" / "plait" / "kernels"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_is_not_used(folder, mode) -> None:
    folder.chmod(mode)
    assert object_code.cache_folder() is None


def test_a_folder_of_another_user_or_a_link_is_not_used(folder, monkeypatch, tmp_path) -> None:
    with monkeypatch.context() as other:
        other.setattr(object_code.os, "geteuid", lambda: os.stat(folder).st_uid + 1)
        assert object_code.cache_folder() is None
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert object_code.cache_folder() is None


def test_without_a_folder_code_is_compiled_but_not_kept(monkeypatch, tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("PLAIT_KERNEL_CACHE_DIR", str(file))
    library = KernelLibrary("kernel", answer)
    assert object_code.cache_folder() is None and not library.is_missing and library.load()["answer"]


def test_files_that_others_can_write_or_links_are_not_read(folder) -> None:
    path = folder / "code.o"
    object_code.write(path, b"code")
    assert object_code.read(path) == b"code" and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    assert object_code.read(path) is None
    path.chmod(0o600)
    link = folder / "link.o"
    link.symlink_to(path)
    assert object_code.read(link) is None


@pytest.mark.timeout(20)  # a FIFO that is waited for
@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_what_is_no_private_file_is_not_read_and_is_replaced(folder, kind) -> None:
    path = folder / "code.o"
    odd_files.put(kind, path, hashlib.sha256(b"code").digest() + b"code")
    assert object_code.read(path) is None
    object_code.write(path, b"new")
    assert object_code.read(path) == (None if kind == "folder" else b"new")


@pytest.mark.parametrize("position", [0, object_code.CHECKSUM_BYTES, -1])
def test_altered_and_cut_files_are_not_read(folder, position) -> None:
    path = folder / "code.o"
    object_code.write(path, b"machine code")
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert object_code.read(path) is None
    path.write_bytes(content[:position])
    assert object_code.read(path) is None


def test_a_file_that_cannot_be_completed_leaves_nothing(folder) -> None:
    path = folder / "code.o"
    path.mkdir()  # so that the finished file cannot be moved there
    object_code.write(path, b"code")
    assert list(folder.iterdir()) == [path]


def test_kernels_are_read_from_a_folder_that_cannot_be_written(folder, monkeypatch) -> None:
    """The rights of files mean nothing to root, so the system's answers are replaced."""

    def refuse(*args, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    path = object_code.cache_path("code")
    object_code.write(path, b"code")
    monkeypatch.setattr(object_code.os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(object_code.os, "utime", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(object_code, "_write_part", refuse)
    assert object_code.cache_folder() is None and object_code.cache_path("code") == path
    assert object_code.read(path) == b"code"
    object_code.write(path, b"other")
    assert object_code.read(path) == b"code"


def test_a_full_disk_leaves_nothing(folder, monkeypatch) -> None:
    """The part of the content that fits has been written when the disk is full."""
    opened = os.fdopen

    def full(fd, mode):
        with opened(os.dup(fd), mode) as file:
            file.write(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_code, "open", full, raising=False)
    object_code.write(folder / "code.o", b"code")
    assert list(folder.iterdir()) == []


def test_the_unfinished_file_of_a_killed_process_is_removed_and_that_of_a_running_one_is_not(folder) -> None:
    killed, running = folder / "a.1.part", folder / "b.2.part"
    for part in (killed, running):
        part.write_bytes(b"par")
    os.utime(killed, (0, time.time() - object_code.MAX_WRITING_S - 60))
    object_code.write(folder / "code.o", b"code")
    assert running.exists() and not killed.exists()


def test_writing_deletes_what_no_start_has_read_for_a_month(folder) -> None:
    old, used = folder / "old.o", folder / "used.o"
    for path in (old, used):
        object_code.write(path, b"code")
        os.utime(path, (0, time.time() - object_code.MAX_UNUSED_S - 60))
    assert object_code.read(used) == b"code"
    object_code.write(folder / "new.o", b"code")
    assert not old.exists() and used.exists()


def test_the_path_depends_on_the_kernels_the_sources_and_the_compiler(folder, monkeypatch) -> None:
    paths = [object_code.cache_path("kernel"), object_code.cache_path("other"), object_code.cache_path("kernel", "f")]
    monkeypatch.setattr(object_code, "SOURCE_HASH", 1)
    paths.append(object_code.cache_path("kernel"))
    monkeypatch.setattr(object_code, "llvmlite", SimpleNamespace(__version__="0"))
    paths.append(object_code.cache_path("kernel"))
    assert len({*paths}) == 5


def test_another_process_loads_what_this_one_compiled(folder) -> None:
    thread_pool.KernelLibrary("threads", thread_pool.run_step, thread_pool.serve_steps).load()
    code = (
        "from plait.kernels.cpu.compiler.library import KernelLibrary\n"
        "KernelLibrary.compile_optimized = None\n"  # would raise
        "from plait.kernels.cpu.parallel import thread_pool\n"
        "assert all(thread_pool.LIBRARY.load().values())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert np.all([file.suffix == ".o" for file in folder.iterdir()])
