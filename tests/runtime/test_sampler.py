"""The sampler against an obvious reference in plain Python, and against statistics."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime import sampler as s
from plait.runtime.sampling import sampling_params

VOCAB = 40


def gen(seed=0, step=0, counts=None, **params):
    made = SimpleNamespace(params=sampling_params(**params), seed=seed, num_sampled=step, output_counts=counts or {})
    return made


def reference(logits, row):
    """One row, token by token, in Python's own arithmetic."""
    params, values = row.params, [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token, count in row.output_counts.items():
        values[token] -= count * params.frequency_penalty + params.presence_penalty
    if max(values) == -math.inf:
        return s.NO_TOKEN
    if params.temperature == 0 or params.top_k == 1:
        return values.index(max(values))
    peak = max(values)
    weights = [math.exp((v - peak) / params.temperature) for v in values]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    kept = order if filtered else list(range(len(probs)))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if filtered:
        total, mass, nucleus = sum(probs[t] for t in kept), 0.0, []
        for token in kept:
            if mass < params.top_p * total:
                nucleus.append(token)
            mass += probs[token]
        kept = [t for t in nucleus if probs[t] >= params.min_p * probs[order[0]] and probs[t] > 0]
    draw, mass = s.uniform(row.seed, row.num_sampled) * sum(probs[t] for t in kept), 0.0
    for token in kept:
        mass += probs[token]
        if mass > draw:
            return token
    return kept[-1]


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


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(params, counts, st.integers(0, 2**62)), min_size=1, max_size=6), st.integers(0, 1000))
def test_every_row_of_a_batch_is_what_the_reference_gives_alone(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    gens = [gen(seed=each, step=i, counts=c, **p) for i, (p, c, each) in enumerate(rows)]
    expected = [reference(logits[i], g) for i, g in enumerate(gens)]
    bent = logits.clone()
    for i, g in enumerate(gens):
        s.adjust(bent[i], g)
    found = s.choose(bent, gens)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        if f != e:  # only where the draw lies on a border that float32 and Python place differently
            alone = s.choose(bent[i : i + 1].double(), [gens[i]])[0]
            assert e in (alone, f), (rows[i], f, e)
            assert _is_close_call(bent[i], gens[i], f, e)


def _is_close_call(logits, row, a, b):
    probs = torch.softmax(logits.double() / (row.params.temperature or 1.0), -1)
    order = torch.sort(probs, descending=True, stable=True).indices.tolist()
    ranks = sorted((order.index(a), order.index(b))) if s._is_filtered(row) else sorted((a, b))
    return ranks[1] - ranks[0] == 1


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_masks_are_applied_bit_by_bit(data):
    batch = data.draw(st.integers(1, 5))
    masked = sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
    words = np.array(
        data.draw(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2),
                           min_size=len(masked), max_size=len(masked))), dtype=np.int32)  # fmt: skip
    logits = torch.randn(batch, VOCAB)
    found = logits.clone()
    s.Sampler(torch.device("cpu")).apply_mask(found, s.Mask(masked, words, {}))
    for row in range(batch):
        for token in range(VOCAB):
            allowed = row not in masked or words[masked.index(row), token // 32] >> (token % 32) & 1
            assert found[row, token] == (logits[row, token] if allowed else -math.inf)


def test_no_token_left_and_logits_that_are_not_finite_are_told_apart():
    rows = torch.zeros(3, VOCAB)
    rows[1, 5] = float("nan")
    rows[2, 5] = float("inf")
    for temperature in (0.0, 1.0):
        first, *others = s.choose(rows.clone(), [gen(temperature=temperature, logit_bias={5: -100.0})] * 3)
        assert first >= 0 and others == [s.NOT_FINITE, s.NOT_FINITE]
    rows[0, 7] = rows[0, 9] = 1.0
    assert s.choose(rows[:1], [gen(temperature=0.0)]) == [7], "of equal ones the first"
    assert s.choose(torch.full((1, VOCAB), -math.inf), [gen()]) == [s.NO_TOKEN]
    assert s.choose(torch.full((1, VOCAB), -math.inf), [gen(temperature=0.0)]) == [s.NO_TOKEN]


def test_samples_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    rows = [gen(seed=11, step=i) for i in range(20_000)]
    found = Counter(s.choose(logits.expand(len(rows), -1), rows))
    for token, p in enumerate(torch.softmax(logits[0], -1).tolist()):
        assert found[token] / len(rows) == pytest.approx(p, abs=0.015)


def test_draws_are_uniform_and_differ_by_seed_and_step():
    draws = [s.uniform(seed, step) for seed in range(100) for step in range(100)]
    assert len(set(draws)) == len(draws)
    assert 0.49 < sum(draws) / len(draws) < 0.51
    assert all(0 <= d < 1 for d in draws)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_top_p_looks_further_than_its_first_glance(monkeypatch):
    monkeypatch.setattr(s, "NUCLEUS_FIRST", 4)
    logits = torch.zeros(1, VOCAB)
    found = {s.choose(logits, [gen(seed=i, top_p=0.9)])[0] for i in range(500)}
    assert found == set(range(36))


def test_equal_tokens_at_the_edge_of_top_k_are_taken_by_id():
    logits = torch.zeros(1, VOCAB)
    assert {s.choose(logits, [gen(seed=i, top_k=3)])[0] for i in range(200)} == {0, 1, 2}


def test_no_temperature_is_too_small():
    logits = torch.randn(1, VOCAB)
    for extra in ({}, {"top_p": 0.9}, {"top_k": 5}):
        assert s.choose(logits, [gen(temperature=1e-38, **extra)]) == [int(logits.argmax())]
