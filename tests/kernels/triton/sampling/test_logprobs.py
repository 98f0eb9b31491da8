"""Triton's log-probabilities, compared with torch's log_softmax."""

from __future__ import annotations

import math

import pytest
import reference_sampling as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import logits_of
from triton_device import DEVICE

from plait.kernels.triton.sampling import logprobs
from plait.runtime.sampling_params import MAX_TOP_LOGPROBS

dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 50, 4096, 9001]), st.integers(0, 30), st.integers(0, 10**6), dtypes)
def test_gathered_logprobs_equal_the_reference(rows, vocab, pairs, seed, dtype):
    logits = logits_of(rows, vocab, 4.0, seed, dtype)
    if vocab > 1:
        logits[0, 1:] = -math.inf
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(-1, rows, (pairs,), generator=generator).int().to(DEVICE)
    tokens = torch.randint(-1, vocab, (pairs,), generator=generator).int().to(DEVICE)
    result = logprobs.gather_logprobs(logits, at, tokens)
    expected = reference.gather_logprobs(logits, at, tokens)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 5, 50, 4096, 9001]), st.integers(1, 20), st.integers(0, 10**6), dtypes)
def test_top_logprobs_equal_the_reference(rows, vocab, count, seed, dtype):
    logits = logits_of(rows, vocab, 1.0, seed, dtype)
    logits[0] = logits[0].round()
    values, ids = logprobs.top_logprobs(logits, count)
    expected_values, expected_ids = reference.top_logprobs(logits, count)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values, expected_values, atol=2e-5, rtol=1e-5)


def test_the_most_top_logprobs_that_a_request_may_ask_for():
    logits = logits_of(2, 200, 1.0, 3, torch.float32)
    values, ids = logprobs.top_logprobs(logits, MAX_TOP_LOGPROBS)
    expected_values, expected_ids = reference.top_logprobs(logits, MAX_TOP_LOGPROBS)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values, expected_values, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [0, 129])
def test_unsupported_counts_raise(count):
    with pytest.raises(ValueError, match="1 to 128"):
        logprobs.top_logprobs(torch.zeros(1, 100), count)
