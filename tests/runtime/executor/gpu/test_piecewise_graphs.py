"""Steps with prompts in graphs between the attention calls, on a device whose graphs are lists of recorded calls.

A replay runs no Python of the model: it sees wrong buffers, wrong places of attention, and memory of other graphs.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from delayed_device import DelayedStream, QueuedRunner
from engine_runs import CPU, MODELS, PAGES, WORDS, run
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_prefix_reference import LEADER_READS
from tiny_hf_models import randomized

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu import stream as stream_module
from plait.runtime.executor.gpu.cuda_graphs import PIECEWISE, GraphKey, make_piecewise_capture_sizes
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Append, Close, Embed, Generate, Open
from plait.runtime.sampling_params import sampling_params

BATCH_TOKENS = 40


@pytest.fixture(params=MODELS, scope="module")
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    randomized(MODELS[request.param]()).save_pretrained(folder)
    config = engine_config(device="cpu", dtype="float32", max_pages=PAGES, max_batch_tokens=BATCH_TOKENS)
    plain = TorchRunner(config, folder)
    fused = TorchRunner(config, folder, kernels=dataclasses.replace(plain.kernels, fused=LEADER_READS))
    return SimpleNamespace(plain=plain, fused=fused)


def launcher(model, rows, progress_probability=0.0, seed=0):
    """A launcher on a delayed device, with all graphs captured."""
    steps = GpuStepLauncher(model.fused, rows, DelayedStream(progress_probability, seed))
    with torch.inference_mode():
        steps.graphs.capture_all()
    return steps


programs = st.fixed_dictionaries(
    {
        "at": st.integers(0, 20),
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=70),
        "n": st.integers(1, 12),
        "constraint": st.sampled_from([None, None, None, WORDS]),
        "fields": st.sampled_from([{}, {}, {"logprobs": True}, {"prompt_logprobs_from": 0}, {"temperature": 1.2}]),
        "embeds": st.sampled_from([False, False, False, True]),
    }
)


@settings(max_examples=12, deadline=None)
@given(
    work=st.lists(programs, min_size=2, max_size=8),
    rows=st.integers(1, 6),
    progress_probability=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 9),
)
def test_chunks_beside_decoding_rows_give_the_tokens_of_synchronous_steps(
    model, work, rows, progress_probability, seed
):
    arrivals = []
    for i, program in enumerate(work):
        fields = {"temperature": 0.0, "seed": i, "ignore_eos": True, "max_tokens": program["n"]} | program["fields"]
        opened = [Open(i), Append(i, program["prompt"])]
        if program["embeds"]:
            opened.append(Embed(i, 100 + i))
        sent = [*opened, Generate(i, i, sampling_params(**fields), program["constraint"]), Close(i)]
        arrivals += [(program["at"], message) for message in sent]
    steps = launcher(model, rows, progress_probability, seed)
    expected = run(model.plain, arrivals, rows=rows)
    results = run(QueuedRunner(model.fused, steps.stream), arrivals, steps, rows=rows)
    assert steps.graphs.num_late_captures == 0
    for call, outcome in expected.items():
        found = results[call]
        assert found.tokens == outcome.tokens and type(found.end) is type(outcome.end), call
        for ours, theirs in zip(found.logprobs, outcome.logprobs, strict=True):
            assert ours.token_id == theirs.token_id and ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        vectors = [np.frombuffer(getattr(x.end, "embedding", None) or b"", "<f4") for x in (found, outcome)]
        np.testing.assert_allclose(*vectors, atol=1e-4)


def test_every_step_with_a_prompt_of_any_length_is_replayed(model):
    """A prompt is computed in chunks beside a decoding row; no step runs operator by operator."""
    greedy = sampling_params(max_tokens=20, temperature=0.0, ignore_eos=True)
    arrivals = [(0, Open(1)), (0, Append(1, [1, 2])), (0, Generate(1, 1, greedy))]
    arrivals += [(3, Open(2)), (3, Append(2, [1, 2, 3] * 30)), (3, Generate(2, 2, greedy))]
    arrivals += [(9, Open(3)), (9, Append(3, [3, 1] * 6)), (9, Embed(3, 3)), (9, Generate(3, 4, greedy))]
    steps, eager = launcher(model, 4), []
    model.fused.prepare_inputs, prepare = (
        lambda batch: eager.append(batch) or prepare(batch),
        model.fused.prepare_inputs,
    )
    results = run(QueuedRunner(model.fused, steps.stream), arrivals, steps, rows=4)
    del model.fused.prepare_inputs
    assert not eager and steps.num_piecewise >= 4
    assert results[2].tokens == run(model.plain, arrivals, rows=4)[2].tokens


def filled_rows(model):
    """Two rows on pages of their own: one with 21 new tokens behind 3 cached ones, one that decodes behind 5."""
    rows = []
    for first, length, cached in ((0, 24, 3), (40, 6, 5)):
        seq = Sequence(CacheNamespace(), [1 + (first + i) % 3 for i in range(length)])
        seq.pages.extend(np.arange(first, first + length, dtype=np.int32)[::-1].copy())
        fill = Batch(64)
        fill.add(Request(None, seq, 0, length), 0, cached)
        model.fused.forward(fill)
        rows.append((seq, cached))
    return rows


def test_padded_tokens_write_no_kv_and_change_no_logits(model):
    """In every size the rows have the same logits, and only the pages of their new tokens change."""
    rows, steps, logits = filled_rows(model), launcher(model, 4), []
    batch = Batch(64)
    for number, (seq, cached) in enumerate(rows):
        logits_from = len(seq) - 1 if number else len(seq)  # the first row is a chunk that samples nothing
        batch.add(Request(None, seq, 0, logits_from), cached, len(seq) - cached)
    batch.sampled_requests = [(0, None)]
    before = [cache.k.clone() for cache in model.fused.kv_cache]
    assert steps.graphs.graph_key(batch) == GraphKey(32, PIECEWISE)
    for tokens in (32, BATCH_TOKENS):
        steps.graphs.forward(batch, GraphKey(tokens, PIECEWISE))
        steps.stream.enqueue(lambda: logits.append(steps.graphs.logits(1).clone()))
        steps.stream.run_until(steps.stream.num_enqueued)
    plain = model.fused.logits(model.fused.forward(batch), {})
    for found in logits:
        torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    new = {int(page) for seq, cached in rows for page in seq.pages.view()[cached:]}
    for cache, cache_before in zip(model.fused.kv_cache, before, strict=True):
        changed = (cache.k.view(torch.int32) != cache_before.view(torch.int32)).flatten(1).any(1).nonzero().flatten()
        assert set(changed.tolist()) <= new


def test_graphs_of_all_sizes_share_what_lies_between_them(model):
    """A size adds neither queries nor hidden states of its own: the pool holds only what one forward pass needs."""
    steps = launcher(model, 4)
    buffers, shared = steps.graphs._piece_buffers, set()
    for tensor in (buffers.queries, buffers.attended, buffers.hidden):
        shared.add(tensor.untyped_storage().data_ptr())
        assert len(tensor) == BATCH_TOKENS
    for recorder in steps.stream.graph_pool.recorders:
        assert len(recorder.pieces) == model.fused.config.num_layers + 1
        for piece in recorder.pieces:
            read = {pointer for _, _, _, _, inputs in piece for pointer in inputs}
            assert read & shared


def test_piecewise_sizes_increase_up_to_the_maximum():
    for n in (1, 16, 24, 64, 100, 512, 600, 1000, 1024, 1100, 2048):
        sizes = make_piecewise_capture_sizes(n)
        assert sizes[-1] == n and sorted(set(sizes)) == sizes
    assert len(make_piecewise_capture_sizes(1024)) == 14


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph; logs what is captured and replayed."""

    def __init__(self) -> None:
        self.number = len(FakeGraph.made)
        FakeGraph.made.append(self)

    def capture_begin(self, pool, capture_error_mode):
        assert pool == "pool" and capture_error_mode == "thread_local"
        FakeGraph.log.append(("begin", self.number))

    def capture_end(self):
        FakeGraph.log.append(("end", self.number))

    def replay(self):
        FakeGraph.log.append(("replay", self.number))


def test_a_cuda_stream_captures_one_graph_a_piece(monkeypatch):
    """Torch's calls, in order: nothing runs between the end of a capture and the begin of the next."""
    FakeGraph.made, FakeGraph.log = [], []
    fake = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "current_stream": lambda device: fake,
        "Stream": lambda device: fake,
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": FakeGraph,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "stream": lambda stream: torch.inference_mode(),
    }.items():
        monkeypatch.setattr(stream_module.torch.cuda, name, value)
    cuda = stream_module.CudaStream(CPU)

    def work(split):
        for part in range(3):
            FakeGraph.log.append(("run", part))
            if part < 2:
                split()

    replay = cuda.capture_pieces(work)
    runs = [("run", part) for part in range(3)]
    assert FakeGraph.log[:6] == runs * 2, "two warm-up runs"
    assert FakeGraph.log[6:] == [("begin", 0), runs[0], ("end", 0), ("begin", 1), runs[1], ("end", 1), ("begin", 2),
                                 runs[2], ("end", 2)]  # fmt: skip
    FakeGraph.log.clear()
    replay([lambda: FakeGraph.log.append("first"), lambda: FakeGraph.log.append("second")])
    assert FakeGraph.log == [("replay", 0), "first", ("replay", 1), "second", ("replay", 2)]
