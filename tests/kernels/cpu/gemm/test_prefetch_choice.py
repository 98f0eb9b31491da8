"""How weights are prefetched: measured once for a processor and kept; the results do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import product
from quantized_activations import random_int8
from stored_weights import random_weight

from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import layout_kernels, packed_weights, prefetch_choice
from plait.kernels.cpu.gemm.int8_kernel import FAR, NEAR
from plait.kernels.cpu.gemm.layouts import LAYOUTS

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-28: the kernels need AVX2")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measurements that `prefetches` returns one after the other, instead of taking time; a folder of its own."""
    results = [[(1.0, 0.5), (1.0, 0.94)], [(1.0, 0.96), (1.0, 2.0)]]
    monkeypatch.setattr(prefetch_choice, "measure", lambda: results.pop(0))
    monkeypatch.setattr(object_code, "cache_path", lambda name, *depends_on: tmp_path / name)
    return tmp_path / "prefetches"


def chosen():
    """What a new process would take."""
    return prefetch_choice.prefetches.__wrapped__()


def test_the_faster_way_is_kept(measured):
    assert chosen() == FAR
    assert chosen() == FAR  # not measured again
    measured.write_bytes(b"damaged")
    assert chosen() == NEAR  # within five percent the former way stays


def test_one_row_and_several_are_chosen_apart():
    assert prefetch_choice.choice(True, False) == {**NEAR, 1: FAR[1]}
    assert prefetch_choice.choice(False, True) == {**FAR, 1: NEAR[1]}


def test_both_ways_are_measured():
    (one_near, one_far), (several_near, several_far) = prefetch_choice.measure()
    assert min(one_near, one_far, several_near, several_far) > 0


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "BF16"])
def test_bits_do_not_depend_on_the_choice(name, monkeypatch):
    packed = packed_weights.pack(random_weight(name, 64, 2 * LAYOUTS[name].unit_inputs, 0))
    machine, results = object_code.target_machine(), []
    for ways in ((False, False), (True, True)):
        way = prefetch_choice.choice(*ways)
        monkeypatch.setattr(layout_kernels, "prefetches", lambda way=way: way)
        code = layout_kernels._compile(LAYOUTS[name], machine)
        kernel = layout_kernels.LayoutKernel(*object_code.load(code, layout_kernels.LayoutKernel._fields))
        results.append([product(packed, random_int8(rows, packed.inputs, rows), kernel) for rows in (1, 2, 7)])
    for near, far in zip(*results, strict=True):
        assert np.array_equal(near, far)
