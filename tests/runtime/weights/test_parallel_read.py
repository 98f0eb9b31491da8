"""Reading parts of files by several threads: equal to slices of the file, and errors that end it."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from family_cases import FAMILY_CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import CASES, save_quantized
from tiny_hf_models import randomized, write_gguf

from plait.runtime.config import engine_config
from plait.runtime.errors import CorruptModel
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.loading.torch_weights import TorchWeightLoader
from plait.runtime.models.weight_split import Rank
from plait.runtime.weights import parallel_read
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.parallel_read import ParallelReader
from plait.runtime.weights.rank_checkpoint import RankCheckpoint
from plait.runtime.weights.stored_rows import StoredRows, read_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "data"
    path.write_bytes(np.random.default_rng(0).bytes(5000))
    return path


@st.composite
def parts_of_matrices(draw):
    """(begin, [rows, bytes of a row], ranges of rows, columns) within 5,000 bytes."""
    num_rows, row_bytes = draw(st.integers(1, 40)), draw(st.integers(1, 100))
    borders = st.tuples(st.integers(0, num_rows), st.integers(0, num_rows)).map(sorted).map(tuple)
    rows = tuple(draw(st.lists(borders, min_size=1, max_size=3)))
    columns = tuple(sorted((draw(st.integers(0, row_bytes)), draw(st.integers(0, row_bytes)))))
    return draw(st.integers(0, 1000)), (num_rows, row_bytes), rows, columns


@settings(max_examples=60, deadline=None)
@given(st.lists(parts_of_matrices(), min_size=1, max_size=3), st.integers(1, 700), st.booleans())
def test_any_parts_of_a_file_are_read_in_chunks_of_any_size(file, parts, chunk, staged):
    reader = ParallelReader(CPU, num_threads=3, chunk_bytes=chunk)
    if staged:
        reader.add_staging(2, is_pinned=False)  # fewer buffers than threads: they wait for each other
    stored, expected = [], []
    for begin, shape, rows, columns in parts:
        matrix = np.fromfile(file, np.uint8)[begin : begin + shape[0] * shape[1]].reshape(shape)
        part = np.concatenate([matrix[first:end] for first, end in rows])[:, slice(*columns)]
        stored.append(StoredRows(file, begin, shape[1], rows, columns))
        assert np.array_equal(read_rows(stored[-1]), part)
        expected.append(part.tobytes())
    target = torch.zeros(len(b"".join(expected)), dtype=torch.uint8)
    reader.read(stored, target)
    reader.close()
    assert target.numpy().tobytes() == b"".join(expected)


@pytest.mark.parametrize("staged", [False, True])
def test_a_file_that_ends_early_is_an_error_and_the_reader_goes_on(file, staged):
    reader = ParallelReader(CPU, num_threads=2, chunk_bytes=64)
    if staged:
        reader.add_staging(2, is_pinned=False)
    for _ in range(3):  # a failed read returns its buffers
        with pytest.raises(CorruptModel, match="data is truncated or damaged"):
            reader.read([StoredRows.one_row(file, 4900, 200)], torch.zeros(200, dtype=torch.uint8))
    target = torch.zeros(500, dtype=torch.uint8)
    reader.read([StoredRows.one_row(file, 4500, 500)], target)
    assert bytes(target.tolist()) == file.read_bytes()[4500:]
    with pytest.raises(FileNotFoundError):
        reader.read([StoredRows.one_row(file.with_name("none"), 0, 500)], target)
    with pytest.raises(ValueError, match="does not fit"):
        reader.read([StoredRows.one_row(file, 0, 499)], target)
    reader.close()


def test_after_an_error_no_thread_reads_on(file, monkeypatch):
    """Chunks that have not begun are dropped, and those that have are waited for, before the file is closed."""
    begun, active, is_second = [], [], threading.Event()

    def failing(fd, path, pieces, target):
        begun.append(pieces)
        if pieces[0][0] == 0:
            assert is_second.wait(10)
            raise CorruptModel("first")
        active.append(1)
        is_second.set()
        time.sleep(0.05)
        os.fstat(fd)  # the file is still open
        active.pop()

    monkeypatch.setattr(parallel_read, "read_pieces", failing)
    reader = ParallelReader(CPU, num_threads=2, chunk_bytes=50)
    with pytest.raises(CorruptModel, match="first"):
        reader.read([StoredRows.one_row(file, 0, 5000)], torch.zeros(5000, dtype=torch.uint8))
    assert not active and len(begun) < 20  # of 100
    reader.close()


def test_a_buffer_is_filled_again_only_when_its_copy_has_ended(file):
    """The events of earlier copies are waited for, each before its buffer is read into."""
    reader, waited = ParallelReader(CPU, num_threads=1, chunk_bytes=1000), []
    reader.add_staging(1, is_pinned=False)
    (buffer, _) = reader._staging.get()
    before = buffer.clone()

    def synchronize():
        assert torch.equal(buffer, before), "the buffer changed before its copy had ended"
        waited.append(1)

    reader._staging.put((buffer, SimpleNamespace(synchronize=synchronize)))
    reader.read([StoredRows.one_row(file, 0, 900)], torch.zeros(900, dtype=torch.uint8))
    assert waited == [1]
    reader.close()


def saved_model(kind, folder):
    """The file of a tiny model's weights."""
    if kind == "GGUF":
        write_gguf(randomized(FAMILY_CASES["llama"].build(intermediate_size=128)), folder / "model.gguf", "Q8_0")
        return folder / "model.gguf"
    if kind == "bf16":
        randomized(FAMILY_CASES["llama"].build()).to(torch.bfloat16).save_pretrained(folder)
    else:
        save_quantized(folder, CASES[kind])
    return folder / "model.safetensors"


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("weight-reader")]


def test_a_runner_that_has_loaded_keeps_no_reading_threads(tmp_path):
    save_quantized(tmp_path, CASES["AWQ"])
    before, during = reading_threads(), []
    loaded = TorchRunner(
        engine_config(device="cpu", weights="bf16", max_pages=90),
        tmp_path,
        lambda fraction, doing: during.append(len(reading_threads())),
    )
    assert loaded.model is not None and max(during) > len(before) == len(reading_threads())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["bf16", "GGUF", "fp8, blocks", "GPTQ 4, act-order", "AWQ", "NF4, nested", "MXFP4"])
def test_a_file_that_was_truncated_after_it_was_opened_ends_the_load(kind, ranks, tmp_path):
    """With an error, and not with a signal, as reading mapped memory would."""
    file = saved_model(kind, tmp_path)
    weights = open_checkpoint(file if kind == "GGUF" else tmp_path)
    if ranks > 1:
        weights = RankCheckpoint(weights, Rank(1, ranks))
    os.truncate(file, file.stat().st_size // 2)
    loader = TorchWeightLoader(weights, "as-stored", torch.bfloat16, CPU)
    matrices = [name for name in weights.names() if "_proj.weight" in name]
    read = (lambda name: weights.read_blocks(name, "cpu")) if kind == "bf16" else loader.load_matrix
    with pytest.raises(CorruptModel, match=rf"{file.name} is truncated or damaged"):
        list(map(read, matrices))
