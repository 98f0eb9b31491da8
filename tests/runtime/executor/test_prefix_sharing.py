"""Shared prefixes: the choice of groups, their arrays on the device, and whole engines with and without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from delayed_device import DelayedStream, QueuedRunner
from engine_runs import SHAPE, run
from hypothesis import given
from hypothesis import strategies as st
from tiny_hf_models import randomized, runner
from transformers import LlamaForCausalLM
from triton_device import DEVICE

from plait.kernels.layout import PrefixSharingCost, shared_prefix_arrays
from plait.kernels.triton.attention import cascade, decode, paged, split_kv_plan, tile_config
from plait.kernels.triton.operators import triton_kernels
from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.prefix_groups import PrefixGroup
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu import static_prefix_groups
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.executor.prefix_sharing import PrefixSharing
from plait.runtime.executor.torch_device import upload
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Append, Close, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params


def decoding(texts):
    """Rows that have all but their last token in the cache."""
    cache, rows = PrefixCache(1000), []
    for text in texts:
        seq = Sequence(("", ""), text)
        cache.activate(seq, len(text) - 1)
        cache.extend_from_cache(seq, len(text) - 1)
        cache.allocate(seq, len(text) - 1 - seq.num_computed)
        cache.publish(seq)
        rows.append(ScheduledRequest(Request(None, seq, 0, 0), len(text) - 1, 1, 1))
    return rows


def test_groups_must_save_the_operators_minimum():
    rows = decoding([[1] * 100 + [tail] * 5 for tail in (2, 3, 4)])
    for least, pays in ((200, True), (201, False)):
        prefix_sharing = PrefixSharing(lambda most, n=least: PrefixSharingCost(4, 0, n, most), [None, None])
        assert prefix_sharing.groups(rows, 1) == ([PrefixGroup([0, 1, 2], 100)] if pays else [])
        assert prefix_sharing.groups(rows, 1) == ([PrefixGroup([0, 1, 2], 100)] if pays else [])
        prefix_sharing.count(prefix_sharing.groups(rows, 1))
        assert prefix_sharing.num_spared == (200 if pays else 0)


def test_a_window_limits_the_saving():
    rows = decoding([[1] * 100 + [tail] * 5 for tail in (2, 3)])
    for windows, spared in (([None], 100), ([10], 10), ([10, None], 55), ([10, 10, 10, 400], 32.5)):
        for least, pays in ((int(spared), True), (int(spared) + 1, False)):
            prefix_sharing = PrefixSharing(lambda most, n=least: PrefixSharingCost(1, 0, n, most), windows)
            assert bool(prefix_sharing.groups(rows, 1)) == pays, windows


def test_rows_longer_than_the_operators_limit_take_no_part():
    rows = decoding([[1] * 50 + [tail] * 5 for tail in (2, 3, 4)])
    rows[1] = ScheduledRequest(rows[1].request, 50, 4, 1)
    prefix_sharing = PrefixSharing(lambda most: PrefixSharingCost(1, 0, 1, 4 if most > 3 else 1), [None])
    assert prefix_sharing.groups(rows, 4) == [PrefixGroup([0, 1, 2], 50)]
    assert prefix_sharing.groups(rows, 1) == [PrefixGroup([0, 2], 50)]


@given(st.data(), st.integers(2, 40))
def test_static_arrays_hold_the_groups_of_the_moment(data, rows):
    """As the kernel walks them: a group's tokens are its members', whatever stood there before."""
    room = static_prefix_groups.array_lengths(50, 100)
    host = {name: np.full(size, 77, dtype=np.int32) for name, size in room.items()}
    counts = np.array(data.draw(st.lists(st.integers(1, 2), min_size=rows, max_size=rows)), dtype=np.int32)
    order, groups = data.draw(st.permutations(range(rows))), []
    while len(order) > 1 and len(groups) < static_prefix_groups.max_groups(rows) and data.draw(st.booleans()):
        size = data.draw(st.integers(2, len(order)))
        groups.append((sorted(order[:size]), data.draw(st.integers(1, 99))))
        order = order[size:]
    static_prefix_groups.fill(host, shared_prefix_arrays(groups, counts) if groups else [])
    device = {name: torch.from_numpy(values) for name, values in host.items()}
    shared, firsts = static_prefix_groups.view(device, 50, 100), np.cumsum(counts) - counts
    assert len(shared.leader_rows) == static_prefix_groups.max_groups(50)
    starts = shared.starts.tolist()
    assert starts == sorted(starts) and starts[0] == 0
    for (members, length), start, end, leader in zip(
        groups, starts, starts[1:], shared.leader_rows.tolist(), strict=False
    ):
        assert leader in members
        wanted = [int(firsts[row]) + i for row in members for i in range(counts[row])]
        assert shared.tokens[start:end].tolist() == wanted
        for row in members:
            assert shared.lengths[row] == length
            assert shared.tokens[shared.token_offsets[row]] == firsts[row]
    assert set(starts[len(groups) :]) == {sum(int(counts[row]) for members, _ in groups for row in members)}
    lonely = set(range(50)) - {row for members, _ in groups for row in members}
    assert not any(shared.lengths[row] for row in lonely)
    if groups:
        assert [len(each) for each in shared_prefix_arrays(groups, counts)] == [
            rows,
            rows,
            len(groups) + 1,
            starts[-1],
            len(groups),
        ]


def test_uploaded_arrays_are_aligned():
    arrays = [np.arange(n, dtype=np.int32) for n in (1, 0, 4, 7, 3)]
    sent = upload(arrays, torch.device("cpu"))
    assert [each.tolist() for each in sent] == [each.tolist() for each in arrays]
    assert all(each.data_ptr() % 16 == 0 for each in sent if len(each))


# -- a whole engine on Triton's kernels -----------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    made = LlamaForCausalLM.config_class(**SHAPE | {"num_hidden_layers": 1})
    randomized(LlamaForCausalLM(made)).save_pretrained(folder)
    return folder


def programs():
    """One text of 132 tokens; two branches of it, and one that comes later and leaves it after 129; each ends at a time
    of its own, and one goes on."""
    text = np.random.default_rng(3).integers(1, 60, 140).tolist()

    def greedy(session, call, n):
        return 0, Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))

    branches = [(0, Open(1)), (0, Append(1, text[:132])), (0, Fork(1, [2])), (0, Append(1, [5])), greedy(1, 1, 12)]
    branches += [(0, Append(2, [6, 7])), greedy(2, 2, 4), (0, Append(2, [9] * 6)), greedy(2, 20, 2)]
    return [
        *branches,
        *((4 + at, each) for at, each in [(0, Open(3)), (0, Append(3, text[:129] + [8])), greedy(3, 3, 5)]),
        (0, Close(1)),
    ]


def test_tokens_are_the_same_with_groups_and_without(folder, monkeypatch):
    expected = run(runner(folder), programs(), rows=3)
    for name in ("MIN_CASCADE_SAVING_BYTES", "CASCADE_GROUP_COST_BYTES"):
        monkeypatch.setattr(tile_config, name, 1)  # else nothing of so small a model is worth it
    for module in (paged, cascade, decode, split_kv_plan):
        monkeypatch.setattr(module, "gpu_spec", lambda device: tile_config.GpuSpec(90, 6))  # fewer programs
    config = engine_config(device=str(DEVICE), dtype="float32", max_pages=400, max_batch_tokens=140)
    ours = TorchRunner(config, folder, kernels=triton_kernels(torch.float32))
    steps = GpuStepLauncher(ours, 3, DelayedStream(0.5, 1))
    found = run(QueuedRunner(ours, steps.stream), programs(), steps, rows=3)
    assert {call: each.tokens for call, each in found.items()} == {call: x.tokens for call, x in expected.items()}
    assert ours.num_spared_tokens >= 8 * 128
    assert {size.has_shared_prefixes for size in steps.graphs.graphs} == {False, True}


def test_prefix_groups_can_be_turned_off(folder):
    for wanted in (True, False):
        config = engine_config(device="cpu", dtype="float32", max_pages=400, prefix_groups=wanted)
        made = TorchRunner(config, folder, kernels=triton_kernels(torch.float32))
        assert (made.prefix_sharing is not None) == wanted
        assert made.num_spared_tokens == 0
