"""Logits of architectures that transformers computes, against transformers' own forward, in float32 to 1e-4."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from other_architectures import OTHER_ARCHITECTURES, build_other
from tiny_hf_models import (
    assert_chunks_equal,
    assert_close,
    assert_rows_over_a_prefix_equal,
    randomized,
    run,
    runner,
    text,
    transformers_logits,
)

from plait.runtime.executor.transformers_runner import TransformersRunner


@pytest.fixture(params=OTHER_ARCHITECTURES, scope="module")
def pair(request, tmp_path_factory):
    """transformers' model and plait's runner on one checkpoint."""
    model = randomized(build_other(request.param))
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")  # the only one that has softcap and sinks
    ours = runner(folder, backend="transformers")  # also where plait has a family
    assert isinstance(ours, TransformersRunner)
    return SimpleNamespace(reference=model, ours=ours)


def test_cold_prefill_equals_transformers(pair):
    tokens = text(60, 0)
    (ours,) = run(pair.ours, [(tokens, range(60), 0, 60, 0)])
    assert_close(ours, transformers_logits(pair.reference, tokens))


def test_chunks_and_decode_equal_transformers(pair):
    assert_chunks_equal(pair.ours, pair.reference)


def test_a_batch_over_a_cached_prefix_equals_transformers(pair):
    assert_rows_over_a_prefix_equal(pair.ours, pair.reference)


def test_logits_of_some_tokens_only(pair):
    tokens = text(9, 4)
    (expected,) = run(pair.ours, [(tokens, range(9), 0, 9, 8)])
    hidden = pair.ours.forward(_batch(tokens))
    (some,) = pair.ours.logits(hidden, {0: np.array([3, 90])})
    assert_close(some[[3, 90]], expected[0, [3, 90]])
    assert torch.isinf(some).sum() == 95


def _batch(tokens):
    from plait.runtime.batch.batch import Batch
    from plait.runtime.batch.request import Request
    from plait.runtime.kv_cache.radix_node import CacheNamespace
    from plait.runtime.kv_cache.sequence import Sequence

    seq = Sequence(CacheNamespace(), tokens)
    seq.pages.extend(range(len(tokens)))
    batch = Batch(100)
    batch.add(Request(None, seq, 0, len(tokens) - 1), 0, len(tokens))
    return batch
