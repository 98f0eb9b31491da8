"""Logit operations in NumPy and torch, compared with a plain Python reference and with statistics."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import sampling_inputs
from plait.runtime.sampling import logit_ops, numpy_ops, torch_ops
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations
from plait.runtime.sampling.torch_ops import TorchLogitOperations
from plait.runtime.sampling_params import sampling_params

VOCAB = 40
HOST, TORCH = NumpyLogitOperations(), TorchLogitOperations(torch.device("cpu"))
both = pytest.mark.parametrize("ops", [HOST, TORCH], ids=["numpy", "torch"])


def request_like(seed=0, step=0, counts=None, **params):
    """The attributes of a GenerationRequest that sampling reads."""
    return SimpleNamespace(
        params=sampling_params(**params), seed=seed, num_sampled=step, output_counts=counts or {}, seen_tokens=None
    )


def prepared(ops, logits):
    """A float32 copy of the logits as the operations take them."""
    copy = np.array(logits, np.float32)
    return ops.prepare(copy if ops is HOST else torch.from_numpy(copy))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected_token(logits, row):
    """The token that one row must draw, computed token by token in Python."""
    params, values = row.params, [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token, count in row.output_counts.items():
        values[token] -= count * params.frequency_penalty + params.presence_penalty
    if max(values) == -math.inf:
        return logit_ops.NO_TOKEN
    if params.temperature == 0 or params.top_k == 1:
        return values.index(max(values))
    peak = max(values)
    weights = [math.exp((v - peak) / params.temperature) for v in values]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1
    candidates = order if filtered else list(range(len(probs)))
    if params.top_k > 0:
        candidates = candidates[: params.top_k]
    if filtered:
        total, mass, nucleus = sum(probs[t] for t in candidates), 0.0, []
        for token in candidates:
            if mass < params.top_p * total:
                nucleus.append(token)
            mass += probs[token]
        candidates = [t for t in nucleus if probs[t] >= params.min_p * probs[order[0]] and probs[t] > 0]
    if params.typical_p < 1:
        candidates = typical(candidates, probs, params.typical_p)
    draw, mass = logit_ops.hash_uniform(row.seed, row.num_sampled) * sum(probs[t] for t in candidates), 0.0
    for token in candidates:
        mass += probs[token]
        if mass > draw:
            return token
    return candidates[-1]


def typical(candidates, probs, typical_p):
    """The candidates, falling, that locally typical sampling keeps: one after the other, the most typical first."""
    total = sum(probs[t] for t in candidates)
    surprise = {t: -math.log(probs[t] / total) for t in candidates}
    entropy = sum(probs[t] / total * surprise[t] for t in candidates)
    kept, mass = [], 0.0
    for token in sorted(candidates, key=lambda t: abs(surprise[t] - entropy)):
        if mass < typical_p:
            kept.append(token)
        mass += probs[token] / total
    return [t for t in candidates if t in kept]


params = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5])},
    optional={
        "top_k": st.integers(1, VOCAB),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    },
)
counts = st.dictionaries(st.integers(0, VOCAB - 1), st.integers(1, 5), max_size=5)


def test_logits_of_a_device_are_copied_to_the_host():
    """On Apple's GPU, for example, which has no sampler of its own."""
    device_logits = SimpleNamespace(cpu=lambda: torch.ones(2, 3))
    assert HOST.prepare(device_logits).tolist() == [[1.0] * 3] * 2


@both
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(params, counts, st.integers(0, 2**62)), min_size=1, max_size=6), st.integers(0, 1000))
def test_draws_of_a_batch_equal_the_reference_of_each_row(ops, rows, seed):
    logits = 3 * normal(len(rows), VOCAB, seed=seed)
    draws = [request_like(seed=s, step=i, counts=c, **p) for i, (p, c, s) in enumerate(rows)]
    expected = [expected_token(logits[i], draw) for i, draw in enumerate(draws)]
    adjusted = prepared(ops, logits)
    for i, draw in enumerate(draws):
        ops.apply_penalties_and_bias(adjusted[i], draw)
    tokens = ops.draw_tokens(adjusted, draws)
    for i, (token, reference) in enumerate(zip(tokens, expected, strict=True)):
        if token != reference:  # allowed only at a border between tokens, which float32 rounds differently
            assert _is_at_border(np.asarray(adjusted[i], np.float64), draws[i]), (rows[i], token, reference)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, VOCAB), st.floats(0.01, 0.999), st.sampled_from([0.1, 1.0, 4.0]))
def test_typical_tokens_are_those_of_the_reference(seed, count, typical_p, spread):
    weights = np.sort(np.exp(spread * normal(count, seed=seed).astype(np.float64)))[::-1]
    probs = (weights / weights.sum()).tolist()
    kept = np.flatnonzero(logit_ops.is_typical(weights, typical_p)).tolist()
    assert kept and kept == typical(range(count), probs, typical_p)
    padded = np.append(weights, np.zeros(3))  # what other filters leave out stays out
    assert np.flatnonzero(logit_ops.is_typical(padded, typical_p)).tolist() == kept


@both
@pytest.mark.parametrize("filters", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "temperature": 1.7}], ids=str)
def test_typical_p_is_the_last_filter(ops, filters):
    logits = normal(1, VOCAB, seed=3)
    draws = [request_like(seed=s, typical_p=0.6, **filters) for s in range(200)]
    drawn = [ops.draw_tokens(prepared(ops, logits), [draw])[0] for draw in draws]
    assert drawn == [expected_token(logits[0], draw) for draw in draws]
    left = [request_like(seed=s, **filters) for s in range(2000)]
    assert set(drawn) < {ops.draw_tokens(prepared(ops, logits), [draw])[0] for draw in left}
    probabilities = ops.probabilities(prepared(ops, logits)[0], draws[0])
    assert {int(token) for token in np.flatnonzero(probabilities)} >= set(drawn)
    assert probabilities.sum() == pytest.approx(1)
    off = [request_like(seed=s, typical_p=1.0, **filters) for s in range(50)]
    assert [ops.draw_tokens(prepared(ops, logits), [draw]) for draw in off] == [
        ops.draw_tokens(prepared(ops, logits), [draw]) for draw in left[:50]
    ]


def test_a_likely_token_is_less_typical_than_others_where_most_are_unlikely():
    """The case of the paper: the mode is left out, which top-p never does."""
    logits = np.log(np.array([[0.3, *[0.7 / 39] * 39]], np.float32))
    drawn = {HOST.draw_tokens(logits.copy(), [request_like(seed=s, typical_p=0.5)])[0] for s in range(300)}
    assert drawn and 0 not in drawn


def _is_at_border(logits, row):
    """Whether the draw, or the limit of top-p or min-p, lies on a border between two tokens."""
    params = row.params
    weights = np.exp((logits - logits.max()) / (params.temperature or 1.0))
    order = np.argsort(-weights, kind="stable") if row.params.is_filtered else np.arange(len(weights))
    sums = np.cumsum(weights[order]) / weights.sum()
    totals = sums if row.params.is_filtered else sums[-1:]  # sums up to each possible last token
    draw = logit_ops.hash_uniform(row.seed, row.num_sampled)
    edges = [np.abs(sums / total - draw).min() for total in totals]
    if row.params.is_filtered:
        total = sums[params.top_k - 1] if params.top_k > 0 else 1.0
        edges += [np.abs(sums - params.top_p * total).min(), np.abs(weights / weights.max() - params.min_p).min()]
    return min(edges) < 1e-5


@both
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_masks_are_applied_bit_by_bit(ops, data):
    batch = data.draw(st.integers(1, 5))
    masked = sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
    words = np.array(
        data.draw(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2),
                           min_size=len(masked), max_size=len(masked))), dtype=np.int32)  # fmt: skip
    logits = normal(batch, VOCAB)
    masked_logits = prepared(ops, logits)
    ops.apply_mask(masked_logits, logit_ops.TokenMask(masked, words, {}))
    for row in range(batch):
        for token in range(VOCAB):
            allowed = row not in masked or words[masked.index(row), token // 32] >> (token % 32) & 1
            assert masked_logits[row, token] == (logits[row, token] if allowed else -math.inf)


@both
def test_empty_masks_and_logits_that_are_not_finite_are_distinguished(ops):
    rows = np.zeros((3, VOCAB), np.float32)
    rows[1, 5] = float("nan")
    rows[2, 5] = float("inf")
    for temperature in (0.0, 1.0):
        first, *others = ops.draw_tokens(
            prepared(ops, rows), [request_like(temperature=temperature, logit_bias={5: -100.0})] * 3
        )
        assert first >= 0 and others == [logit_ops.NOT_FINITE, logit_ops.NOT_FINITE]
    rows[0, 7] = rows[0, 9] = 1.0
    assert ops.draw_tokens(prepared(ops, rows[:1]), [request_like(temperature=0.0)]) == [7], "the first of equal logits"
    none = prepared(ops, np.full((1, VOCAB), -math.inf))
    assert ops.draw_tokens(none, [request_like()]) == [logit_ops.NO_TOKEN]
    assert ops.draw_tokens(none, [request_like(temperature=0.0)]) == [logit_ops.NO_TOKEN]


@both
def test_draws_follow_the_distribution(ops):
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    rows = [request_like(seed=11, step=i) for i in range(20_000)]
    counts = Counter(ops.draw_tokens(prepared(ops, np.repeat(logits, len(rows), axis=0)), rows))
    for token, p in enumerate(torch.softmax(torch.from_numpy(logits[0]), -1).tolist()):
        assert counts[token] / len(rows) == pytest.approx(p, abs=0.015)


def test_masked_tokens_are_never_drawn(monkeypatch):
    """Rounding may put the draw after the last weight of a block, or of all."""
    logits = np.full((1, 3 * numpy_ops.DRAW_BLOCK), -math.inf, np.float32)
    allowed = [3, numpy_ops.DRAW_BLOCK - 5, numpy_ops.DRAW_BLOCK + 7, 2 * numpy_ops.DRAW_BLOCK - 9]
    logits[0, allowed] = [0.1, 0.7, 0.3, 0.2]
    for draw in (*np.linspace(0, 1, 4001), np.nextafter(1.0, 0.0)):
        monkeypatch.setattr(numpy_ops, "hash_uniform", lambda seed, step, draw=draw: draw)
        for extra in ({}, {"top_p": 0.9}, {"min_p": 0.01}):
            assert HOST.draw_tokens(logits, [request_like(**extra)])[0] in allowed


def test_draws_are_uniform_and_differ_by_seed_and_step():
    draws = [logit_ops.hash_uniform(seed, step) for seed in range(100) for step in range(100)]
    assert len(set(draws)) == len(draws)
    assert 0.49 < sum(draws) / len(draws) < 0.51
    assert all(0 <= d < 1 for d in draws)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


@both
def test_top_p_sorts_all_tokens_if_the_first_pass_is_not_enough(ops, monkeypatch):
    for module in (numpy_ops, torch_ops):
        monkeypatch.setattr(module, "TOP_P_FIRST_PASS", 4)
    logits = prepared(ops, np.zeros((1, VOCAB)))
    assert {ops.draw_tokens(logits, [request_like(seed=i, top_p=0.9)])[0] for i in range(500)} == set(range(36))


@both
def test_ties_at_the_limit_of_top_k_are_broken_by_token_id(ops):
    logits = prepared(ops, np.zeros((1, VOCAB)))
    assert {ops.draw_tokens(logits, [request_like(seed=i, top_k=3)])[0] for i in range(200)} == {0, 1, 2}


@both
def test_very_small_temperatures_are_greedy(ops):
    logits = normal(1, VOCAB)
    for temperature in (1e-38, 1e-300):
        for extra in ({}, {"top_p": 0.9}, {"top_k": 5}):
            tokens = ops.draw_tokens(prepared(ops, logits), [request_like(temperature=temperature, **extra)])
            assert tokens == [int(logits.argmax())]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 20), st.integers(0, 1000))
def test_numpy_logprobs_equal_those_of_torch_and_do_not_depend_on_other_rows(rows, vocab, top, seed):
    logits = 5 * normal(rows, vocab, seed=seed)
    logprobs, expected = HOST.log_softmax(logits), torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    np.testing.assert_allclose(logprobs, expected, atol=2e-6, rtol=2e-6)
    assert all(np.array_equal(HOST.log_softmax(logits[i]), logprobs[i]) for i in range(rows))
    order = np.argsort(-logprobs[0], kind="stable")[:top]
    assert HOST.topk(logprobs[0], top) == list(zip(order.tolist(), logprobs[0][order].tolist(), strict=True))
    assert HOST.values(logprobs[0], order.tolist()) == logprobs[0][order].tolist()


def test_failure_tokens_equal_those_of_the_kernels():
    assert (logit_ops.NO_TOKEN, logit_ops.NOT_FINITE) == (sampling_inputs.NO_TOKEN, sampling_inputs.NOT_FINITE)
