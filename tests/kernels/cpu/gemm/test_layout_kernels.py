"""The machine code of layouts on disk: found again, compiled again when damaged or where nothing can be kept."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from kernel_calls import unpacked
from stored_weights import dequantized_weight, random_weight

from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import layout_kernels, packed_weights

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
FORM = "Q4_0"


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The path of a layout's file, which does not exist yet, and the layouts that were compiled."""
    names, compile_form = [], layout_kernels._compile
    monkeypatch.setattr(layout_kernels, "_cache_path", lambda name: tmp_path / "folder" / f"{name}.o")
    monkeypatch.setattr(
        layout_kernels, "_compile", lambda layout, machine: names.append(layout.name) or compile_form(layout, machine)
    )
    return tmp_path / "folder" / f"{FORM}.o", names


def load_and_use():
    """Loads the layout as a new process does, and uses it."""
    weight = random_weight(FORM, 5, 64, 0)
    kernel = layout_kernels._load.__wrapped__(FORM)
    assert np.array_equal(unpacked(packed_weights.pack(weight), kernel), dequantized_weight(weight))


def test_code_is_compiled_once_and_a_damaged_file_again(compiled):
    path, names = compiled
    load_and_use()
    load_and_use()
    assert names == [FORM]
    content = bytearray(path.read_bytes())
    for damaged in (content[:-10], b"", content[:100] + bytes([content[100] ^ 1]) + content[101:]):
        path.write_bytes(damaged)
        load_and_use()
        assert path.read_bytes() == content
    assert names == [FORM] * 4
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_time_only(compiled):
    path, names = compiled
    path.parent.write_text("not a folder")
    load_and_use()
    load_and_use()
    assert names == [FORM] * 2


def test_one_row_loads_its_weights_in_the_order_of_memory():
    """The lines of one half of a tile after those of the other; Zen 4 reads half as fast where they alternate."""
    product = layout_kernels.assembly("BF16").split("\nproduct:", 1)[1]
    loads = re.findall(r"\tv\w+\t(-?\d*)\((%r[^s]\w+)\), ", product.split("\n\tj", 2)[1])
    (weights, _), *_ = Counter(register for _, register in loads).most_common()
    offsets = [int(offset or 0) for offset, register in loads if register == weights]
    halves = sorted(set(offsets))
    middle = halves[len(halves) // 2]
    assert len(halves) >= 32
    assert max(i for i, x in enumerate(offsets) if x < middle) < min(i for i, x in enumerate(offsets) if x >= middle)
