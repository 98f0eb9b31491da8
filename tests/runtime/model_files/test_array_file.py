"""Files of arrays: what was written is mapped, and every damage is found."""

from __future__ import annotations

import mmap
import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.model_files.array_file import (
    BLOCK,
    CHUNK,
    HUGE_PAGE,
    DamagedFile,
    array_starts,
    file_bytes,
    map_arrays,
    write_arrays,
)

HEAD_BYTES = 48 + len(b'{"name": "x"}') + 8 * 3  # preamble, metadata, table of checksums
SECTOR = 512


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


@given(st.binary(max_size=100), st.lists(st.integers(0, 3 * CHUNK) | st.integers(0, 3 * BLOCK), max_size=4))
def test_what_was_written_is_mapped(tmp_path_factory, metadata, sizes):
    path, arrays = tmp_path_factory.getbasetemp() / "arrays", random_arrays(sizes)
    write(path, metadata, arrays)
    assert path.stat().st_size == file_bytes(metadata, sizes)
    found_metadata, found = read(path, sizes)
    assert found_metadata == metadata
    assert all(np.array_equal(*pair) for pair in zip(found, arrays, strict=True))
    assert not any(array.flags.writeable for array in found)


def test_large_arrays_lie_in_huge_pages(tmp_path, monkeypatch):
    """Linux keeps in pages of 2 MiB what is written in such parts, from a multiple of them on."""
    places, write_bytes = [], os.write

    def spy(fd, content):
        places.append((os.lseek(fd, 0, os.SEEK_CUR), len(content)))
        return write_bytes(fd, content)

    monkeypatch.setattr(os, "write", spy)
    sizes = [16 * BLOCK, BLOCK + 1]
    path, arrays = tmp_path / "large", random_arrays(sizes)
    write(path, b"", arrays)
    assert [size for place, size in places if place] == [HUGE_PAGE] * 8 + [BLOCK + CHUNK]
    assert not any(place % HUGE_PAGE for place, _ in places)
    _, found = read(path, sizes)
    assert all(np.array_equal(*pair) for pair in zip(found, arrays, strict=True))
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        with open("/proc/self/smaps") as smaps:
            of_file = smaps.read().split(str(path))[1]
        assert "hg" in of_file.split("VmFlags:")[1].split("\n")[0].split()


def test_a_system_without_huge_pages_maps_files_too(tmp_path, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    arrays = random_arrays([BLOCK + 1])
    write(tmp_path / "file", b"", arrays)
    assert np.array_equal(read(tmp_path / "file", [BLOCK + 1])[1][0], arrays[0])


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """(a file of four arrays, its content, the arrays' sizes)"""
    sizes = [100, 2 * CHUNK, 2 * BLOCK, CHUNK + 1]
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


def test_truncated_files_are_found(sample):
    path, content, sizes = sample
    lengths = [0, 1, 47, 48, HEAD_BYTES, CHUNK, CHUNK + BLOCK, len(content) - BLOCK, len(content) - CHUNK]
    for length in [*lengths, len(content) - 1]:
        assert is_damaged(path, content[:length], sizes), length
    assert is_damaged(path, content + b"\0", sizes) and is_damaged(path, content + bytes(CHUNK), sizes)


def exchanged(content, first, second, size):
    """The content with two pieces of this size at these places exchanged."""
    assert first + size <= second
    middle = content[first + size : second]
    pieces = content[:first], content[second : second + size], middle, content[first : first + size]
    return b"".join(pieces) + content[second + size :]


@pytest.mark.parametrize("size", [1, 8, 64, SECTOR, 4096, CHUNK, BLOCK])
def test_exchanged_pieces_are_found(sample, size):
    """Words, cache lines, sectors, pages and blocks, at their own multiples, in one page and far apart."""
    path, content, sizes = sample
    rng, begin = random.Random(size), CHUNK
    for distance in [1, 2, 3, 7, 8, 64]:
        last = (len(content) - CHUNK - 2 * CHUNK - begin) // size - distance - 1
        for _ in range(10 if last >= 0 else 0):
            first = begin + size * rng.randrange(last + 1)
            altered = exchanged(content, first, first + size * distance, size)
            assert altered == content or is_damaged(path, altered, sizes), (first, distance)


@pytest.mark.parametrize("size", [1, 8, SECTOR, 4096, CHUNK, BLOCK])
def test_pieces_that_are_zeroed_lost_or_of_another_file_are_found(sample, size):
    path, content, sizes = sample
    other = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes()
    rng = random.Random(size)
    for _ in range(20):
        place = CHUNK + size * rng.randrange((2 * BLOCK) // size)
        before, piece, after = content[:place], content[place : place + size], content[place + size :]
        for now in (bytes(size), b"\xff" * size, other, content[place + size : place + 2 * size]):
            assert now == piece or is_damaged(path, before + now + after, sizes), place


def test_each_bit_and_each_two_bits_of_a_block_count(sample):
    """Also the highest bits of two words, whose sum modulo 2^64 is the same when both are altered."""
    path, content, sizes = sample
    rng = random.Random(0)
    for _ in range(300):
        altered = bytearray(content)
        word, other = rng.sample(range(CHUNK // 8, (CHUNK + BLOCK) // 8), 2)
        bit = rng.choice([63, rng.randrange(64)])
        altered[8 * word + bit // 8] ^= 1 << bit % 8
        assert is_damaged(path, altered, sizes)
        altered[8 * other + bit // 8] ^= 1 << bit % 8
        assert is_damaged(path, altered, sizes)
