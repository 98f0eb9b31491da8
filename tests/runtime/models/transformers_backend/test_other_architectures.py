"""Logits of architectures that transformers computes, against transformers' own forward, in float32 to 1e-4."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from other_architectures import OTHER_ARCHITECTURES, build_other
from tiny_hf_models import randomized, run, runner, text, transformers_logits

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


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_cold_prefill_equals_transformers(pair):
    tokens = text(60, 0)
    (ours,) = run(pair.ours, [(tokens, range(60), 0, 60, 0)])
    assert_close(ours, transformers_logits(pair.reference, tokens))


def test_chunks_and_decode_equal_transformers(pair):
    tokens, pages = text(40, 1), np.random.default_rng(2).permutation(256)
    expected = transformers_logits(pair.reference, tokens)
    start = 0
    for count in (9, 1, 13, 1, 1, 15):
        (ours,) = run(pair.ours, [(tokens, pages, start, count, start)])
        assert_close(ours, expected[start : start + count])
        start += count


def test_a_batch_over_a_cached_prefix_equals_transformers(pair):
    prefix, free = text(20, 3), iter(range(20, 256))
    run(pair.ours, [(prefix, range(20), 0, 20, 19)])
    rows, expected = [], []
    for seed, length in enumerate((1, 2, 7, 30)):
        tokens = prefix + text(length, 10 + seed)
        pages = [*range(20), *itertools.islice(free, length)]
        rows.append((tokens, pages, 20, length, len(tokens) - 1))
        expected.append(transformers_logits(pair.reference, tokens)[-1:])
    cold = text(12, 20)
    rows.append((cold, list(itertools.islice(free, 12)), 0, 12, 0))
    expected.append(transformers_logits(pair.reference, cold))
    for logits, reference in zip(run(pair.ours, rows), expected, strict=True):
        assert_close(logits, reference)


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
