"""Weights read by several threads are the bytes of the file, directly and through staging buffers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_runs import MODELS
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_hf_models import randomized

from plait.runtime.errors import CorruptModel
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.parallel_read import ParallelReader

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "data"
    path.write_bytes(np.random.default_rng(0).bytes(5000))
    return path


@settings(max_examples=40, deadline=None)
@given(begin=st.integers(0, 2000), count=st.integers(0, 1500), chunk=st.integers(1, 700), staged=st.booleans())
def test_any_part_of_a_file_is_read_in_chunks_of_any_size(file, begin, count, chunk, staged):
    reader = ParallelReader(CPU, num_threads=3, chunk_bytes=chunk * 2)
    if staged:
        reader.add_staging(2, is_pinned=False)  # fewer buffers than threads: they wait for each other
    target = torch.zeros(count, dtype=torch.int16)
    reader.read(file, begin, target)
    reader.close()
    assert target.numpy().tobytes() == file.read_bytes()[begin : begin + 2 * count]


@pytest.mark.parametrize("staged", [False, True])
def test_a_file_that_ends_early_is_an_error_and_the_reader_goes_on(file, staged):
    reader = ParallelReader(CPU, num_threads=2, chunk_bytes=64)
    if staged:
        reader.add_staging(2, is_pinned=False)
    for _ in range(3):  # a failed read returns its buffers
        with pytest.raises(EOFError, match="too early"):
            reader.read(file, 4900, torch.zeros(200, dtype=torch.uint8))
    target = torch.zeros(500, dtype=torch.uint8)
    reader.read(file, 4500, target)
    assert bytes(target.tolist()) == file.read_bytes()[4500:]
    with pytest.raises(FileNotFoundError):
        reader.read(file.with_name("none"), 0, target)
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
    reader.read(file, 0, torch.zeros(900, dtype=torch.uint8))
    assert waited == [1]
    reader.close()


def test_a_checkpoint_reads_its_tensors_by_threads_and_names_a_damaged_file(tmp_path):
    randomized(MODELS["Llama"]()).to(torch.bfloat16).save_pretrained(tmp_path)
    weights = open_checkpoint(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    info = weights._tensor_info(name)
    found = weights._read_to_gpu(name, info, CPU)
    assert found.dtype == torch.bfloat16 and torch.equal(found, weights.tensor(name, torch.bfloat16, "cpu"))
    names = sorted(weights.shapes, key=lambda name: weights._map("model.safetensors").offset(name))
    os.truncate(tmp_path / "model.safetensors", weights._map("model.safetensors").offset(names[-1]) + 1)
    with pytest.raises(CorruptModel, match=r"model\.safetensors is truncated or damaged"):
        weights._read_to_gpu(names[-1], weights._tensor_info(names[-1]), CPU)
