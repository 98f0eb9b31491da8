"""The online softmax update of one lane, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import compiled_kernel

from plait.kernels.cpu.attention import online_softmax, online_softmax_lanes
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.attention.lane_vectors import MASKED_SCORE
from plait.kernels.cpu.attention.products.int8_vnni_kernel import HAS_VNNI, PROB_BITS, PROB_MARGIN
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.vector_ops import address_of

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")


@compiled_kernel
def update(scores, running_max, running_sum, accumulators):
    """One block for one lane; scores are in units of 1 / log2(e), so that a probability is 2 to the score."""
    online_softmax.online_softmax_update(
        address_of(scores), 0, KV_BLOCK, np.float32(1.0), address_of(running_max), address_of(running_sum),
        address_of(accumulators), 1,
    )  # fmt: skip


@compiled_kernel
def update_int8(scores, state, accumulators, scales, largest, out, factors):
    """One block for 4 or 16 lanes; `state` [2, lanes] are running maxima and sums."""
    if state.shape[1] == 4:
        online_softmax_lanes.update_int8(
            4, address_of(scores), 2, np.float32(1.0), address_of(state), address_of(state) + 16,
            address_of(accumulators), 1, 4, address_of(scales), address_of(largest), address_of(out),
            address_of(factors),
        )  # fmt: skip
    else:
        online_softmax_lanes.update_int8(
            16, address_of(scores), 2, np.float32(1.0), address_of(state), address_of(state) + 64,
            address_of(accumulators), 1, 16, address_of(scales), address_of(largest), address_of(out),
            address_of(factors),
        )  # fmt: skip


@compiled_kernel
def soft_cap(scores):
    online_softmax.soft_cap(address_of(scores), np.float32(0.25), np.float32(50.0), len(scores) // 16)


def test_soft_cap_is_a_scaled_tanh():
    special = [0, 1e-6, 1e-3, 1e4, -1e4, np.inf, -np.inf, np.nan]
    scores = np.concatenate([np.linspace(-30, 30, 1008), special, special])
    capped = scores.astype(np.float32)
    soft_cap(capped)
    np.testing.assert_allclose(capped, 50 * np.tanh(scores / 4), atol=50 * 2e-6)


def initial_state():
    """(running maximum, running sum, accumulators) of a lane before its first block."""
    return np.full(1, online_softmax.INITIAL_MAX, np.float32), np.zeros(1, np.float32), np.zeros(16, np.float32)


def test_probabilities_are_powers_of_two_exact_to_bfloat16():
    scores = np.linspace(-80, 0, KV_BLOCK).astype(np.float32)
    probs, (running_max, running_sum, accumulators) = scores.copy(), initial_state()
    update(probs, running_max, running_sum, accumulators)
    exact = np.exp2(scores.astype(np.float64))
    np.testing.assert_allclose(probs, exact, rtol=2**-8)
    np.testing.assert_allclose(running_sum, exact.sum(), rtol=1e-5)
    assert running_max[0] == 0.0
    assert probs[-1] == 1.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=6), st.integers(0, 100))
def test_running_maximum_follows_rising_and_falling_scores(levels, seed):
    """Blocks around several levels give the same sums as all at once, with probabilities of at most 2^8."""
    rng = np.random.default_rng(seed)
    blocks = [(level + rng.normal(0, 4, KV_BLOCK)).astype(np.float32) for level in levels]
    running_max, running_sum, accumulators = initial_state()
    for block in blocks:
        probs = block.copy()
        update(probs, running_max, running_sum, accumulators)
        assert probs.max() <= 2**8
        accumulators += probs.sum()
    exact = np.exp2(np.concatenate(blocks).astype(np.float64) - running_max[0]).sum()
    np.testing.assert_allclose(running_sum, exact, rtol=1e-5)
    np.testing.assert_allclose(accumulators, exact, rtol=2**-7)


def updated_int8(scores, running_max, scales, largest):
    """(integers [64, lanes], their units [lanes], state [2, lanes]) after one block of scores [64, lanes].

    `largest`: the largest scale of the positions that the lanes see.
    """
    lanes = scores.shape[1]
    state = np.stack([running_max, np.zeros(lanes, np.float32)])
    out, factors = np.zeros((KV_BLOCK // 4, 2, lanes, 4), np.int8), np.zeros(lanes, np.float32)
    accumulators, largest = np.zeros((lanes, 16), np.float32), np.full(lanes, largest, np.float32)
    update_int8(scores.copy(), state, accumulators, scales, largest, out, factors)
    integers = out.view(np.uint8).astype(np.int64).transpose(1, 0, 3, 2).reshape(2, KV_BLOCK, lanes)
    return integers[0] + 256 * integers[1], factors, state


@pytest.mark.skipif(not HAS_VNNI, reason="2026-11-26: integer probabilities are for AVX-512 VNNI")
@settings(max_examples=40, deadline=None)
@given(st.floats(-30, 30, width=32), st.floats(-8, 40, width=32), st.floats(0, 5), st.integers(0, 100))
def test_integer_probabilities_are_nearest_and_have_15_bits_at_least(level, below, spread, seed):
    """The integers are p * s to the nearest unit, and all their bits are used; 4 and 16 lanes have the same."""
    rng = np.random.default_rng(seed)
    scores = (level + rng.normal(0, spread, (KV_BLOCK, 16))).astype(np.float32)
    scales = np.exp2(rng.normal(0, spread, KV_BLOCK)).astype(np.float32)
    running_max = (scores.max(0) + np.float32(below)).astype(np.float32)
    integers, units, state = updated_int8(scores, running_max, scales, scales.max())
    probs = np.exp2(scores.astype(np.float64) - state[0])
    exact = probs * scales[:, None]
    assert (np.abs(integers * units.astype(np.float64) - exact) <= 0.5 * units + 4e-6 * exact).all()
    bits = np.log2(probs.max(0) * scales.max() * PROB_MARGIN / units)
    assert ((bits > PROB_BITS - 1 - 1e-4) & (bits < PROB_BITS + 1e-4)).all()
    np.testing.assert_allclose(state[1], probs.sum(0), rtol=1e-5)
    four = updated_int8(np.ascontiguousarray(scores[:, 4:8]), running_max[4:8], scales, scales.max())
    for wide, narrow in zip((integers, units, state), four, strict=True):
        assert np.array_equal(wide[..., 4:8], narrow)


@pytest.mark.skipif(not HAS_VNNI, reason="2026-11-26: integer probabilities are for AVX-512 VNNI")
@pytest.mark.parametrize("lanes", [4, 16])
def test_a_scale_that_is_not_a_number_changes_nothing_for_lanes_that_do_not_see_it(lanes):
    """One token's values overflowed; tokens before it, which share its block, have the bits they would have without."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 2, (KV_BLOCK, lanes)).astype(np.float32)
    scales = np.exp2(rng.normal(0, 1, KV_BLOCK)).astype(np.float32)
    scores[40:] = MASKED_SCORE
    results = []
    for scale in (1.0, np.nan, np.inf):
        scales[40:] = scale
        results.append(updated_int8(scores, scores.max(0), scales, scales[:40].max()))
    for spoiled in results[1:]:
        for exact, found in zip(results[0], spoiled, strict=True):
            assert np.array_equal(exact, found)
