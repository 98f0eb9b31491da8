"""Captured decode steps give the tokens of synchronous steps, for any mix of requests.

Without CUDA a replay runs the captured work again. Padding, page table, masks and graph sizes are tested as on a GPU.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton_device as kernel_device
from engine_runs import CPU, MODELS, PAGES, WORDS, arrivals_of, run
from fake_engine import EOS, spell
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_prefix_reference import LEADER_READS
from synchronous_stream import ImmediateStream
from tiny_hf_models import randomized, runner

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.triton.operators import triton_kernels
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu.cuda_graphs import MAX_Q_LEN, GraphKey, make_capture_sizes
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher, make_gpu_step_launcher
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Abort, Append, Fork, Generate, Open, Select
from plait.runtime.sampling_params import sampling_params


@pytest.fixture(params=MODELS, scope="module")
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    randomized(MODELS[request.param]()).save_pretrained(folder)
    config = engine_config(device="cpu", dtype="float32", max_pages=PAGES, max_batch_tokens=24)
    plain = TorchRunner(config, folder)
    kernels = dataclasses.replace(plain.kernels, fused=LEADER_READS)
    return SimpleNamespace(plain=plain, fused=TorchRunner(config, folder, kernels=kernels), folder=folder)


params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 25),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.5]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "ignore_eos": st.booleans(),
    },
    optional={
        "top_k": st.integers(1, 9),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.05, 0.3]),
        "logprobs": st.just(True),
        "frequency_penalty": st.just(0.5),
        "logit_bias": st.just({5: 3.0}),
        "min_tokens": st.just(1),
        "stop": st.sampled_from(["a", "t", "JSON"]),
    },
)
calls = st.tuples(
    st.integers(0, 30),  # the step before which it arrives
    st.lists(st.integers(1, 3), min_size=1, max_size=30),
    params,
    st.sampled_from([None, None, WORDS]),
)


@settings(max_examples=25, deadline=None)
@given(work=st.lists(calls, min_size=1, max_size=10), rows=st.integers(1, 9))
def test_any_mix_of_requests_gives_the_tokens_of_synchronous_steps(model, work, rows):
    arrivals = []
    for i, (when, prompt, fields, constraint) in enumerate(work):
        fields = {**fields, "stop": fields.get("stop") if constraint is None else None}
        opened = [Open(i), Append(i, prompt), Generate(i, i, sampling_params(**fields), constraint)]
        arrivals += [
            (when, message)
            for message in [*opened, Generate(i, 100 + i, sampling_params(max_tokens=2, temperature=0.0))]
        ]
    expected = run(model.plain, arrivals, rows=rows)
    results = run(model.fused, arrivals, GpuStepLauncher(model.fused, rows, ImmediateStream(CPU)), rows=rows)
    for call, outcome in expected.items():
        assert results[call].tokens == outcome.tokens, call
        assert type(results[call].end) is type(outcome.end)
        assert [x.token_id for x in results[call].logprobs] == [x.token_id for x in outcome.logprobs]


def test_decode_is_replayed_as_the_batch_grows_and_shrinks(model):
    steps = GpuStepLauncher(model.fused, 8, ImmediateStream(CPU))
    results = run(model.fused, arrivals_of(12), steps, rows=8)
    assert {call: outcome.tokens for call, outcome in results.items()} == {
        call: outcome.tokens for call, outcome in run(model.plain, arrivals_of(12), rows=8).items()
    }
    assert steps.num_graph_replays > 12
    assert {size.tokens for size in steps.graphs.graphs if size.q_len == 1} >= {1, 2, 4, 8}


def test_steps_of_forced_tokens_are_replayed(model):
    steps, arrivals = GpuStepLauncher(model.fused, 8, ImmediateStream(CPU)), []
    for i in range(8):
        gen = Generate(i, i, sampling_params(seed=i, temperature=2.0), WORDS)
        arrivals += [(i // 3, request) for request in (Open(i), Append(i, [2 + i] * 5), gen)]
    results, expected = run(model.fused, arrivals, steps), run(model.plain, arrivals)
    assert {c: x.tokens for c, x in results.items()} == {c: x.tokens for c, x in expected.items()}
    assert {tuple(outcome.tokens) for outcome in results.values()} <= {tuple(spell(x)) for x in WORDS.choices}
    assert any(size.q_len == MAX_Q_LEN for size in steps.graphs.graphs)


def test_replays_beside_selects_forks_and_aborts(model):
    gen = sampling_params(max_tokens=10, temperature=0.0, ignore_eos=True)
    arrivals = [
        (0, Open(1)), (0, Append(1, [1, 2, 3] * 4)), (0, Generate(1, 1, gen)), (0, Fork(1, [2, 3])),
        (0, Generate(2, 2, gen)), (0, Append(3, [7])), (0, Generate(3, 3, gen)), (4, Open(4)), (4, Append(4, [5] * 3)),
        (4, Generate(4, 4, gen)), (9, Abort(4, 4)), (12, Open(5)), (12, Append(5, [1, 2])),
        (12, Select(5, 5, [[1, 2], [3]])), (12, Generate(5, 6, gen)),
    ]  # fmt: skip
    expected = run(model.plain, arrivals)
    results = run(model.fused, arrivals, GpuStepLauncher(model.fused, 6, ImmediateStream(CPU)))
    sent, expected_sent = results.pop(4).tokens, expected.pop(4).tokens
    assert sent == expected_sent[: len(sent)]
    assert {c: x.tokens for c, x in results.items()} == {c: x.tokens for c, x in expected.items()}


def test_retracted_requests_continue_on_other_pages(model):
    """The pool does not hold all requests at once: sequences lose their pages and get others."""
    arrivals = [(0, r) for _, r in arrivals_of(8, n=60)]
    expected = run(model.plain, arrivals, rows=8)
    small = TorchRunner(
        engine_config(device="cpu", dtype="float32", max_pages=120, max_batch_tokens=24),
        model.folder,
        kernels=model.fused.kernels,
    )
    results = run(small, arrivals, GpuStepLauncher(small, 8, ImmediateStream(CPU)), rows=8)
    assert {c: x.tokens for c, x in results.items()} == {c: x.tokens for c, x in expected.items()}


def test_replays_on_the_triton_operators(tmp_path):
    randomized(MODELS["Llama"]()).save_pretrained(tmp_path)
    plain = runner(tmp_path)
    config = engine_config(device=str(kernel_device.DEVICE), dtype="float32", max_pages=256, max_batch_tokens=24)
    ours = TorchRunner(config, tmp_path, kernels=triton_kernels(torch.float32))
    steps = GpuStepLauncher(ours, 3, ImmediateStream(CPU))
    arrivals = arrivals_of(3, n=5)
    results, expected = run(ours, arrivals, steps, rows=3), run(plain, arrivals, rows=3)
    assert {c: x.tokens for c, x in results.items()} == {c: x.tokens for c, x in expected.items()}
    assert steps.num_graph_replays > 5


def test_padding_rows_do_not_affect_logits_or_pages(model):
    """The logits of a row are the same in every graph size, and only its own page changes."""
    steps = GpuStepLauncher(model.fused, 8, ImmediateStream(CPU))
    seq = Sequence(CacheNamespace(), [1, 2, 3])
    seq.pages.extend(np.array([9, 4, 7], dtype=np.int32))
    fill = Batch(64)
    fill.add(Request(None, seq, 0, 2), 0, 3)
    model.fused.forward(fill)
    before = [cache.k.clone() for cache in model.fused.kv_cache]
    batch = Batch(64)
    batch.add(Request(None, seq, 0, 2), 2, 1)
    logits_of_sizes = []
    steps.sampling.sample = lambda logits: logits_of_sizes.append(logits.clone())
    for size in (GraphKey(1, 1), GraphKey(2, 1), GraphKey(8, 1), GraphKey(4, MAX_Q_LEN), GraphKey(16, MAX_Q_LEN)):
        with torch.inference_mode():
            steps.graphs.forward(batch, size)()
        torch.testing.assert_close(logits_of_sizes[-1][0], logits_of_sizes[0][0])
    for cache, cache_before in zip(model.fused.kv_cache, before, strict=True):
        # compared as bits: unwritten pages are uninitialized memory, which may be NaN
        changed = (
            (cache.k.view(torch.int32) != cache_before.view(torch.int32)).flatten(1).any(1).nonzero().flatten().tolist()
        )
        assert set(changed) <= {7}


def test_capture_sizes_increase_up_to_the_maximum():
    assert make_capture_sizes(1) == [1]
    assert make_capture_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert make_capture_sizes(100)[-4:] == [56, 64, 80, 96, 100][-4:]
    assert all(
        make_capture_sizes(n)[-1] == n and sorted(set(make_capture_sizes(n))) == make_capture_sizes(n)
        for n in range(1, 700)
    )


def test_a_cpu_has_no_async_launcher(model):
    assert make_gpu_step_launcher(engine_config(device="cpu"), model.fused) is None
    assert select_kernels(CPU, torch.float32).fused is None
    assert EOS == 0
