"""Captured decode steps give the tokens of synchronous steps, for any mix of requests.

Capturing is replaced by running the work again, so that everything else runs here: padding, page table, masks, sizes.
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
from tiny_hf_models import randomized, runner

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.triton.operators import triton_kernels
from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu.cuda_graphs import MAX_Q_LEN, GraphKey, make_capture_sizes
from plait.runtime.executor.gpu.double_buffer import DoubleBuffer
from plait.runtime.executor.gpu.page_table import DevicePageTable
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher, make_gpu_step_launcher
from plait.runtime.executor.gpu.stream import ImmediateStream
from plait.runtime.executor.torch_runner import TorchRunner
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
    st.integers(0, 30),  # when it comes
    st.lists(st.integers(1, 3), min_size=1, max_size=30),
    params,
    st.sampled_from([None, None, WORDS]),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(work=st.lists(calls, min_size=1, max_size=10), rows=st.integers(1, 9))
def test_any_mix_of_requests_gives_the_tokens_of_synchronous_steps(model, work, rows):
    arrivals = []
    for i, (when, prompt, fields, constraint) in enumerate(work):
        fields = {**fields, "stop": fields.get("stop") if constraint is None else None}
        opened = [Open(i), Append(i, prompt), Generate(i, i, sampling_params(**fields), constraint)]
        arrivals += [
            (when, each) for each in [*opened, Generate(i, 100 + i, sampling_params(max_tokens=2, temperature=0.0))]
        ]
    expected = run(model.plain, arrivals, rows=rows)
    found = run(model.fused, arrivals, GpuStepLauncher(model.fused, rows, ImmediateStream(CPU)), rows=rows)
    for call, each in expected.items():
        assert found[call].tokens == each.tokens, call
        assert type(found[call].end) is type(each.end)
        assert [x.token_id for x in found[call].logprobs] == [x.token_id for x in each.logprobs]


def test_decode_is_replayed_as_the_batch_grows_and_shrinks(model):
    steps = GpuStepLauncher(model.fused, 8, ImmediateStream(CPU))
    found = run(model.fused, arrivals_of(12), steps, rows=8)
    assert {call: each.tokens for call, each in found.items()} == {
        call: each.tokens for call, each in run(model.plain, arrivals_of(12), rows=8).items()
    }
    assert steps.num_graph_replays > 12
    assert {size.tokens for size in steps.graphs.graphs if size.q_len == 1} >= {1, 2, 4, 8}


def test_forced_tokens_are_replayed_too(model):
    steps, arrivals = GpuStepLauncher(model.fused, 8, ImmediateStream(CPU)), []
    for i in range(8):
        gen = Generate(i, i, sampling_params(seed=i, temperature=2.0), WORDS)
        arrivals += [(i // 3, request) for request in (Open(i), Append(i, [2 + i] * 5), gen)]
    found, expected = run(model.fused, arrivals, steps), run(model.plain, arrivals)
    assert {c: x.tokens for c, x in found.items()} == {c: x.tokens for c, x in expected.items()}
    assert {tuple(each.tokens) for each in found.values()} <= {tuple(spell(x)) for x in WORDS.choices}
    assert any(size.q_len == MAX_Q_LEN for size in steps.graphs.graphs)


def test_scores_forks_and_aborts_beside_replays(model):
    gen = sampling_params(max_tokens=10, temperature=0.0, ignore_eos=True)
    arrivals = [
        (0, Open(1)), (0, Append(1, [1, 2, 3] * 4)), (0, Generate(1, 1, gen)), (0, Fork(1, [2, 3])),
        (0, Generate(2, 2, gen)), (0, Append(3, [7])), (0, Generate(3, 3, gen)), (4, Open(4)), (4, Append(4, [5] * 3)),
        (4, Generate(4, 4, gen)), (9, Abort(4, 4)), (12, Open(5)), (12, Append(5, [1, 2])),
        (12, Select(5, 5, [[1, 2], [3]])), (12, Generate(5, 6, gen)),
    ]  # fmt: skip
    expected = run(model.plain, arrivals)
    found = run(model.fused, arrivals, GpuStepLauncher(model.fused, 6, ImmediateStream(CPU)))
    told, aborted = found.pop(4).tokens, expected.pop(4).tokens
    assert told == aborted[: len(told)]
    assert {c: x.tokens for c, x in found.items()} == {c: x.tokens for c, x in expected.items()}


def test_preempted_rows_resume_on_other_pages(model):
    """The pool does not hold all rows at once: sequences lose their pages and get others."""
    arrivals = [(0, r) for _, r in arrivals_of(8, n=60)]
    expected = run(model.plain, arrivals, rows=8)
    small = TorchRunner(
        engine_config(device="cpu", dtype="float32", max_pages=120, max_batch_tokens=24),
        model.folder,
        kernels=model.fused.kernels,
    )
    found = run(small, arrivals, GpuStepLauncher(small, 8, ImmediateStream(CPU)), rows=8)
    assert {c: x.tokens for c, x in found.items()} == {c: x.tokens for c, x in expected.items()}


def test_the_same_on_tritons_operators(tmp_path):
    randomized(MODELS["Llama"]()).save_pretrained(tmp_path)
    plain = runner(tmp_path)
    config = engine_config(device=str(kernel_device.DEVICE), dtype="float32", max_pages=256, max_batch_tokens=24)
    ours = TorchRunner(config, tmp_path, kernels=triton_kernels(torch.float32))
    steps = GpuStepLauncher(ours, 3, ImmediateStream(CPU))
    arrivals = arrivals_of(3, n=5)
    found, expected = run(ours, arrivals, steps, rows=3), run(plain, arrivals, rows=3)
    assert {c: x.tokens for c, x in found.items()} == {c: x.tokens for c, x in expected.items()}
    assert steps.num_graph_replays > 5


# -- the parts ------------------------------------------------------------------------------------


def test_padding_writes_nothing_and_reads_nothing(model):
    """The logits of a row are the same in every size that holds it, and no other page changes."""
    steps = GpuStepLauncher(model.fused, 8, ImmediateStream(CPU))
    seq = Sequence(("", ""), [1, 2, 3])
    seq.pages.extend(np.array([9, 4, 7], dtype=np.int32))
    fill = Batch(64)
    fill.add(Request(None, seq, 0, 2), 0, 3)
    model.fused.forward(fill)
    before = [cache.k.clone() for cache in model.fused.kv_cache]
    batch = Batch(64)
    batch.add(Request(None, seq, 0, 2), 2, 1)
    drawn = []
    steps.sampling.sample = lambda logits: drawn.append(logits.clone())
    for size in (GraphKey(1, 1), GraphKey(2, 1), GraphKey(8, 1), GraphKey(4, MAX_Q_LEN), GraphKey(16, MAX_Q_LEN)):
        with torch.inference_mode():
            steps.graphs.forward(batch, size)()
        torch.testing.assert_close(drawn[-1][0], drawn[0][0])
    for cache, old in zip(model.fused.kv_cache, before, strict=True):
        # compared as bits: unwritten pages are uninitialized memory, which may be NaN
        changed = (cache.k.view(torch.int32) != old.view(torch.int32)).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {7}


def test_the_page_table_follows_every_change():
    page_table = DevicePageTable(3, 16, ImmediateStream(CPU))
    seqs = [Sequence(("", ""), [1] * 16) for _ in range(5)]
    generator = np.random.default_rng(0)
    for _ in range(300):
        chosen = generator.choice(5, size=generator.integers(1, 4), replace=False)
        for i in chosen:
            seq, kind = seqs[i], generator.integers(0, 4)
            if kind == 0:
                seq.pages.truncate(int(generator.integers(0, len(seq.pages) + 1)))
            elif kind == 1 and len(seq.pages):
                seq.pages.replace(0, generator.integers(0, 999, len(seq.pages)).astype(np.int32))
            if len(seq.pages) > 14:
                seq.pages.truncate(3)
            seq.pages.extend(generator.integers(0, 999, generator.integers(1, 3)).astype(np.int32))
        rows = [ScheduledRequest(Request(None, seqs[i], 0, 0), len(seqs[i].pages) - 1, 1, 1) for i in chosen]
        for each, first in zip(rows, page_table.assign_rows(rows), strict=True):
            pages = each.request.seq.pages.view()
            page_table.flat[first + each.start] = int(pages[-1])  # what the step itself does
            assert page_table.flat[first : first + len(pages)].tolist() == pages.tolist()


def test_capture_sizes():
    assert make_capture_sizes(1) == [1]
    assert make_capture_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert make_capture_sizes(100)[-4:] == [56, 64, 80, 96, 100][-4:]
    assert all(
        make_capture_sizes(n)[-1] == n and sorted(set(make_capture_sizes(n))) == make_capture_sizes(n)
        for n in range(1, 700)
    )


def test_a_double_buffer_uploads_to_fixed_addresses():
    fields = {"a": (torch.int32, 3), "b": (torch.int64, 2), "c": (torch.float32, 5)}
    buffer = DoubleBuffer(fields, ImmediateStream(CPU))
    places = {name: tensor.data_ptr() for name, tensor in buffer.device.items()}
    for value in (1, -7):
        buffer.begin()
        for array in buffer.host.values():
            array[:] = value
        buffer.upload()
        assert all(tensor.tolist() == [value] * len(tensor) for tensor in buffer.device.values())
    assert places == {name: tensor.data_ptr() for name, tensor in buffer.device.items()}
    assert all(place % 8 == 0 for place in places.values())


def test_a_cpu_has_no_async_launcher(model):
    assert make_gpu_step_launcher(engine_config(device="cpu"), model.fused) is None
    assert select_kernels(CPU, torch.float32).fused is None
    assert EOS == 0
