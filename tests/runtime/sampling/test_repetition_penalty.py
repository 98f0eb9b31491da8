"""The repetition penalty equals transformers' `RepetitionPenaltyLogitsProcessor`, on the host and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from plait.runtime.batch.request import GenerationRequest, RequestOwner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations
from plait.runtime.sampling.torch_ops import TorchLogitOperations
from plait.runtime.sampling_params import sampling_params

VOCAB = 50
HOST, TORCH = NumpyLogitOperations(), TorchLogitOperations(torch.device("cpu"))
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def request_after(prompt, output, **params):
    """A GenerationRequest that has sampled `output` after `prompt`."""
    owner = RequestOwner("", (b"", 0), 0)
    request = GenerationRequest(owner, Sequence(CacheNamespace(), prompt), 0, sampling_params(**params), 0)
    for token in output:
        request.append(token, 1)
    return request


@pytest.mark.parametrize("ops", [HOST, TORCH], ids=["numpy", "torch"])
@settings(max_examples=200, deadline=None)
@given(tokens.filter(bool), tokens, st.floats(0.01, 100.0), st.integers(0, 2**31), st.booleans())
def test_logits_equal_those_of_transformers(ops, prompt, output, penalty, seed, is_masked):
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 5
    logits[seed % VOCAB] = -np.inf if is_masked else 0.0
    expected = torch.from_numpy(logits.copy())[None]
    if penalty != 1.0:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), expected)
    row = logits.copy() if ops is HOST else torch.from_numpy(logits.copy())
    ops.apply_penalties_and_bias(row, request_after(prompt, output, repetition_penalty=penalty))
    np.testing.assert_array_equal(np.asarray(row), expected[0].numpy())


@pytest.mark.parametrize("ops", [HOST, TORCH], ids=["numpy", "torch"])
def test_it_comes_before_the_other_penalties_and_the_bias(ops):
    row = np.full(VOCAB, 2.0, np.float32)
    row = row if ops is HOST else torch.from_numpy(row)
    request = request_after(
        [3, 4], [4, 5, 5], repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={4: 7.0}
    )
    ops.apply_penalties_and_bias(row, request)
    # The prompt counts for the repetition penalty only.
    assert [float(row[token]) for token in (2, 3, 4, 5)] == [2.0, 1.0, 1.0 - 0.75 + 7.0, 1.0 - 1.0]


@pytest.mark.parametrize("ops", [HOST, TORCH], ids=["numpy", "torch"])
@settings(max_examples=100, deadline=None)
@given(tokens.filter(bool), tokens, st.integers(1, 70), st.integers(0, 2**31))
def test_a_window_has_the_last_tokens_only(ops, prompt, output, last_n, seed):
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
    window = torch.tensor([(prompt + output)[-last_n:]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(window, torch.from_numpy(logits.copy())[None])[0]
    row = logits.copy() if ops is HOST else torch.from_numpy(logits.copy())
    ops.apply_penalties_and_bias(row, request_after(prompt, output, repetition_penalty=1.7, repeat_last_n=last_n))
    np.testing.assert_array_equal(np.asarray(row), expected.numpy())


def test_an_empty_window_is_no_penalty():
    params = sampling_params(repetition_penalty=1.7, repeat_last_n=0)
    assert request_after([1], [2], repetition_penalty=1.7, repeat_last_n=0).seen_tokens is None
    assert not params.has_repetition_penalty and sampling_params(repeat_last_n=64) == sampling_params()


def test_requests_without_the_penalty_keep_no_set_of_tokens():
    assert request_after([1], [2]).seen_tokens is None
    request = request_after([5, 3, 5], [3, 9, 9], repetition_penalty=1.1)
    assert sorted(request.seen_tokens.ids().tolist()) == [3, 5, 9]
