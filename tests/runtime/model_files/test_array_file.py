"""Files of arrays: what was written is mapped, and every damage is found."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.model_files.array_file import (
    CHUNK,
    DamagedFile,
    array_starts,
    file_bytes,
    map_arrays,
    write_arrays,
)

HEAD_BYTES = 48 + len(b'{"name": "x"}') + 8 * 5  # preamble, metadata, table of sums


def in_turn(run, jobs):
    for job in jobs:
        run(job)


def write(path, metadata, arrays):
    with path.open("wb") as file:
        write_arrays(file.fileno(), metadata, arrays)
    return path


def read(path, sizes):
    """(metadata, arrays), after the check of all bytes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        mapped = map_arrays(fd)
    finally:
        os.close(fd)
    mapped.check(in_turn)
    starts = array_starts(sizes)[:-1]
    return mapped.metadata, [mapped.data[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def random_arrays(sizes):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


@given(st.binary(max_size=100), st.lists(st.integers(0, 3 * CHUNK), max_size=4))
def test_what_was_written_is_mapped(tmp_path_factory, metadata, sizes):
    path, arrays = tmp_path_factory.getbasetemp() / "arrays", random_arrays(sizes)
    write(path, metadata, arrays)
    assert path.stat().st_size == file_bytes(metadata, sizes)
    found_metadata, found = read(path, sizes)
    assert found_metadata == metadata
    assert all(np.array_equal(*pair) for pair in zip(found, arrays, strict=True))
    assert not any(array.flags.writeable for array in found)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """(a file of three arrays, its content, the arrays' sizes)"""
    sizes = [100, 2 * CHUNK, CHUNK + 1]
    path = write(tmp_path_factory.mktemp("sample") / "arrays", b'{"name": "x"}', random_arrays(sizes))
    return path, path.read_bytes(), sizes


def is_damaged(path, content, sizes):
    path.write_bytes(content)
    try:
        read(path, sizes)
    except DamagedFile:
        return True
    return False


def test_every_altered_byte_of_the_header_is_found(sample):
    path, content, sizes = sample
    assert not is_damaged(path, content, sizes)
    for place in range(HEAD_BYTES):
        altered = bytearray(content)
        altered[place] ^= 1 << place % 8
        assert is_damaged(path, altered, sizes), place


def test_every_altered_byte_of_the_arrays_is_found(sample):
    path, content, sizes = sample
    rng = random.Random(0)
    for _ in range(500):
        altered = bytearray(content)
        altered[rng.randrange(CHUNK, len(content))] ^= rng.randrange(1, 256)
        assert is_damaged(path, altered, sizes)


def test_truncated_files_and_moved_blocks_are_found(sample):
    path, content, sizes = sample
    lengths = [0, 1, 47, 48, HEAD_BYTES, CHUNK, len(content) - CHUNK, len(content) - 1]
    for length in lengths:
        assert is_damaged(path, content[:length], sizes), length
    assert is_damaged(path, content + b"\0", sizes)
    swapped = content[: 2 * CHUNK] + content[3 * CHUNK : 4 * CHUNK] + content[2 * CHUNK : 3 * CHUNK]
    assert is_damaged(path, swapped + content[4 * CHUNK :], sizes)
    assert is_damaged(path, content[:-CHUNK] + bytes(CHUNK), sizes)
