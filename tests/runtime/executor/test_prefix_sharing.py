"""Prefix sharing: which groups are worth it, and engines with and without groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from delayed_device import DelayedStream, QueuedRunner
from engine_runs import SHAPE, run
from tiny_hf_models import randomized, runner
from transformers import LlamaForCausalLM
from triton_device import DEVICE

from plait.kernels.layout import PrefixSharingCost
from plait.kernels.triton.attention import cascade, decode, paged, split_kv_plan, tile_config
from plait.kernels.triton.operators import triton_kernels
from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.prefix_groups import PrefixGroup
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.executor.prefix_sharing import PrefixSharing
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Append, Close, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params


def decoding_rows(texts):
    """Rows that have all but their last token in the cache."""
    cache, rows = PrefixCache(1000), []
    for text in texts:
        seq = Sequence(CacheNamespace(), text)
        cache.activate(seq, len(text) - 1)
        cache.extend_from_cache(seq, len(text) - 1)
        cache.allocate(seq, len(text) - 1 - seq.num_computed)
        cache.publish(seq)
        rows.append(ScheduledRequest(Request(None, seq, 0, 0), len(text) - 1, 1, 1))
    return rows


def test_a_group_must_save_the_minimum_of_the_operator():
    rows = decoding_rows([[1] * 100 + [tail] * 5 for tail in (2, 3, 4)])
    for min_saved, is_worthwhile in ((200, True), (201, False)):
        prefix_sharing = PrefixSharing(lambda most, n=min_saved: PrefixSharingCost(4, 0, n, most), [None, None])
        assert prefix_sharing.groups(rows, 1) == ([PrefixGroup([0, 1, 2], 100)] if is_worthwhile else [])
        assert prefix_sharing.groups(rows, 1) == ([PrefixGroup([0, 1, 2], 100)] if is_worthwhile else [])
        prefix_sharing.count(prefix_sharing.groups(rows, 1))
        assert prefix_sharing.num_saved_reads == (200 if is_worthwhile else 0)


def test_a_sliding_window_limits_the_saved_tokens():
    rows = decoding_rows([[1] * 100 + [tail] * 5 for tail in (2, 3)])
    for windows, spared in (([None], 100), ([10], 10), ([10, None], 55), ([10, 10, 10, 400], 32.5)):
        for min_saved, is_worthwhile in ((int(spared), True), (int(spared) + 1, False)):
            prefix_sharing = PrefixSharing(lambda most, n=min_saved: PrefixSharingCost(1, 0, n, most), windows)
            assert bool(prefix_sharing.groups(rows, 1)) == is_worthwhile, windows


def test_rows_with_too_many_new_tokens_are_in_no_group():
    rows = decoding_rows([[1] * 50 + [tail] * 5 for tail in (2, 3, 4)])
    rows[1] = ScheduledRequest(rows[1].request, 50, 4, 1)
    prefix_sharing = PrefixSharing(lambda most: PrefixSharingCost(1, 0, 1, 4 if most > 3 else 1), [None])
    assert prefix_sharing.groups(rows, 4) == [PrefixGroup([0, 1, 2], 50)]
    assert prefix_sharing.groups(rows, 1) == [PrefixGroup([0, 2], 50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaForCausalLM.config_class(**SHAPE | {"num_hidden_layers": 1})
    randomized(LlamaForCausalLM(config)).save_pretrained(folder)
    return folder


def programs():
    """Sessions 1 and 2 share a text of 132 tokens; session 3 arrives later and shares 129 of them.

    All end at different steps, and session 2 has a second call.
    """
    text = np.random.default_rng(3).integers(1, 60, 140).tolist()

    def greedy(session, call, n):
        return 0, Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))

    branches = [(0, Open(1)), (0, Append(1, text[:132])), (0, Fork(1, [2])), (0, Append(1, [5])), greedy(1, 1, 12)]
    branches += [(0, Append(2, [6, 7])), greedy(2, 2, 4), (0, Append(2, [9] * 6)), greedy(2, 20, 2)]
    return [
        *branches,
        *((4 + at, message) for at, message in [(0, Open(3)), (0, Append(3, text[:129] + [8])), greedy(3, 3, 5)]),
        (0, Close(1)),
    ]


def test_prefix_groups_do_not_change_tokens(folder, monkeypatch):
    expected = run(runner(folder), programs(), rows=3)
    for name in ("MIN_CASCADE_SAVING_BYTES", "CASCADE_GROUP_COST_BYTES"):
        monkeypatch.setattr(tile_config, name, 1)  # otherwise no group of so small a model is worthwhile
    for module in (paged, cascade, decode, split_kv_plan):
        monkeypatch.setattr(module, "gpu_spec", lambda device: tile_config.GpuSpec(90, 6))  # fewer programs
    config = engine_config(device=str(DEVICE), dtype="float32", max_pages=400, max_batch_tokens=140)
    ours = TorchRunner(config, folder, kernels=triton_kernels(torch.float32))
    steps = GpuStepLauncher(ours, 3, DelayedStream(0.5, 1, records=False))
    results = run(QueuedRunner(ours, steps.stream), programs(), steps, rows=3)
    assert {call: outcome.tokens for call, outcome in results.items()} == {
        call: outcome.tokens for call, outcome in expected.items()
    }
    assert ours.num_saved_reads >= 8 * 128
    assert {size.has_shared_prefixes for size in steps.graphs.graphs} == {False, True}


def test_prefix_groups_can_be_turned_off(folder):
    for is_enabled in (True, False):
        config = engine_config(device="cpu", dtype="float32", max_pages=400, prefix_groups=is_enabled)
        model_runner = TorchRunner(config, folder, kernels=triton_kernels(torch.float32))
        assert (model_runner.prefix_sharing is not None) == is_enabled
        assert model_runner.num_saved_reads == 0
