"""Adapters in captured steps, on a device that works late: rows of several, slots that change, heads and embeddings."""

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
from manual_adapters import ManualCalls
from shared_prefix_reference import LEADER_READS
from synchronous_stream import ImmediateStream
from tiny_adapters import make_adapter, outer_targets_of
from tiny_hf_models import randomized

from plait.runtime.adapters import adapter_pool
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.call_reports import decode_logprobs
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu.cuda_graphs import MAX_Q_LEN, PIECEWISE, GraphKey
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher, prepare_device
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Append, Close, Generate, Open
from plait.runtime.sampling_params import sampling_params

NAMES = ("", "a", "b", "outer")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model, and adapters of other ranks; the last one changes embedding and head too."""
    folder = tmp_path_factory.mktemp("adapters")
    model = randomized(MODELS["Llama"]())
    model.save_pretrained(folder / "base")
    make_adapter(model, folder / "a", 1)
    make_adapter(model, folder / "b", 2, r=20, target_modules=["q_proj", "v_proj", "down_proj"])
    make_adapter(model, folder / "outer", 3, target_modules=outer_targets_of(model))
    return folder


def make_runner(saved, kernels=None, **fields):
    paths = {name: str(saved / name) for name in NAMES[1:]}
    settings = dict(device="cpu", dtype="float32", max_pages=PAGES, max_batch_tokens=40, adapters=paths) | fields
    return TorchRunner(engine_config(**settings), saved / "base", kernels=kernels)


@pytest.fixture(scope="module")
def model(saved):
    plain = make_runner(saved)
    kernels = dataclasses.replace(plain.kernels, fused=LEADER_READS)
    return SimpleNamespace(plain=plain, fused=make_runner(saved, kernels), kernels=kernels)


def launcher(runner, rows, progress_probability=0.0, seed=0):
    steps = GpuStepLauncher(runner, rows, DelayedStream(progress_probability, seed))
    with torch.inference_mode():
        steps.graphs.capture_all()
    return steps


calls = st.fixed_dictionaries(
    {
        "at": st.integers(0, 20),
        "adapter": st.sampled_from(NAMES),
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=50),
        "n": st.integers(1, 10),
        "constraint": st.sampled_from([None, None, WORDS]),
        "fields": st.sampled_from([{}, {"logprobs": True}, {"prompt_logprobs_from": 0}]),
    }
)


def arrivals_of(work):
    arrivals = []
    for i, call in enumerate(work):
        fields = {"temperature": 0.0, "seed": i, "ignore_eos": True, "max_tokens": call["n"]} | call["fields"]
        opened = [Open(i, adapter=call["adapter"]), Append(i, call["prompt"])]
        sent = [*opened, Generate(i, i, sampling_params(**fields), call["constraint"]), Close(i)]
        arrivals += [(call["at"], message) for message in sent]
    return arrivals


def assert_same(found, expected):
    for call, outcome in expected.items():
        assert found[call].tokens == outcome.tokens and type(found[call].end) is type(outcome.end), call
        ours, theirs = (
            [*one.logprobs, *decode_logprobs(one.end.prompt_logprobs or [])] for one in (found[call], outcome)
        )
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
        shown = [[entry.logprob for entry in entries if entry.logprob is not None] for entries in (ours, theirs)]
        assert shown[0] == pytest.approx(shown[1], abs=1e-3), call


@settings(max_examples=8, deadline=None)
@given(
    work=st.lists(calls, min_size=2, max_size=8),
    rows=st.integers(1, 6),
    progress_probability=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 9),
)
def test_any_mix_of_adapters_gives_the_tokens_of_synchronous_steps(model, work, rows, progress_probability, seed):
    steps = launcher(model.fused, rows, progress_probability, seed)
    expected = run(model.plain, arrivals_of(work), rows=rows)
    assert_same(run(QueuedRunner(model.fused, steps.stream), arrivals_of(work), steps, rows=rows), expected)
    assert steps.graphs.num_late_captures == 0
    model.fused.adapter_slots.enqueue = lambda work: work()


def test_steps_with_adapters_are_replayed_and_overlap(model):
    """Decoding, forced tokens, and prompts beside them; steps without an adapter have the graphs without one."""
    names = ("a", "", "outer", "b", "a", "outer")
    work = [
        dict(at=4 * i, adapter=name, prompt=[1 + i % 3] * (1 + 5 * i), n=12, constraint=None, fields={"logprobs": True})
        for i, name in enumerate(names)
    ]
    work[2]["fields"] = {"prompt_logprobs_from": 0}  # the head of its prompt is computed operator by operator
    work += [dict(at=70, adapter="", prompt=[1, 2], n=6, constraint=None, fields={})]
    work += [dict(at=30 + i, adapter="b", prompt=[2, i], n=9, constraint=WORDS, fields={}) for i in range(1, 3)]
    steps, eager = launcher(model.fused, 4), []
    replayed = []
    original = steps._replay
    steps._replay = lambda graphs, batch, key: replayed.append((batch, key)) or original(graphs, batch, key)
    model.fused.prepare_inputs, prepare = (
        lambda batch: eager.append(batch) or prepare(batch),
        model.fused.prepare_inputs,
    )
    found = run(QueuedRunner(model.fused, steps.stream), arrivals_of(work), steps, rows=4)
    del model.fused.prepare_inputs
    assert_same(found, run(model.plain, arrivals_of(work), rows=4))
    assert not eager and steps.num_overlapped > 10
    kinds = {(key.q_len, key.has_adapters) for _, key in replayed}
    assert {(1, True), (1, False), (PIECEWISE, True)} <= kinds
    model.fused.adapter_slots.enqueue = lambda work: work()


@pytest.mark.parametrize("q_len", [MAX_Q_LEN, PIECEWISE])
def test_the_head_of_a_row_is_that_of_its_own_adapter(model, q_len):
    """Behind rows with more tokens and another adapter, in either kind of graph."""
    names, steps, batch = ("a", "outer"), launcher(model.fused, 4), Batch(64)
    for number, name in enumerate(names):
        seq = Sequence(CacheNamespace(adapter=model.fused.adapter_pool.names[name]), [1, 2, 3, 1, 2][number * 4 :])
        seq.pages.extend(np.arange(8 * number, 8 * number + len(seq), dtype=np.int32))
        batch.add(Request(None, seq, 0, len(seq) - 1), 0, len(seq))
    batch.sampled_requests = [(0, None), (1, None)]
    assert steps.graphs.graph_key(batch) == GraphKey(8, MAX_Q_LEN, False, True)
    steps.graphs.forward(batch, GraphKey(8 if q_len else 16, q_len, False, True))
    steps.stream.run_until(steps.stream.num_enqueued)
    expected = model.plain.logits(model.plain.forward(batch), {})
    torch.testing.assert_close(steps.graphs.logits(2), expected, atol=1e-4, rtol=1e-4)
    model.fused.adapter_slots.enqueue = lambda work: work()


def test_adapters_that_take_turns_in_one_slot(saved, model, monkeypatch):
    """A slot gets another adapter while the device still works on steps with the one before."""
    ready = []
    monkeypatch.setattr(adapter_pool, "BackgroundCalls", lambda niceness: ready.append(ManualCalls(1)) or ready[-1])
    fused = make_runner(saved, model.kernels, max_adapters=1)
    steps = launcher(fused, 4)
    work = [
        dict(at=6 * i, adapter=NAMES[i % 4], prompt=[1 + i % 3] * (1 + i), n=8, constraint=None, fields={})
        for i in range(12)
    ]
    found = run(QueuedRunner(fused, steps.stream), arrivals_of(work), steps, rows=4)
    assert len(ready[0].begun) >= 6
    assert_same(found, run(model.plain, arrivals_of(work), rows=4))


def test_an_adapter_in_place_of_another_one_is_read_behind_the_steps_in_flight(model, saved):
    """The table changes, and the memory of the adapter before is given back, only when the device comes to it."""
    fused = make_runner(saved, model.kernels)
    stream = DelayedStream(0.0)
    fused.adapter_slots.enqueue = stream.enqueue
    slot = fused.adapter_pool.slots[fused.adapter_pool.names["a"]]
    before = fused.adapter_slots._table[slot].clone()
    fused.adapter_pool.evict(fused.adapter_pool.names["a"])
    assert torch.equal(fused.adapter_slots._table[slot], before) and before.any()
    stream.run_until(stream.num_enqueued)
    assert not fused.adapter_slots._table[slot].any()


def test_the_kv_pool_leaves_memory_for_adapters_that_come_later(saved, model):
    """Of eight slots, five are empty; ranks are padded."""
    memory = SimpleNamespace(free=lambda: 3 << 30, total=lambda: 4 << 30, peak_of=lambda work: 0)
    pages = []
    for max_adapters in (3, 8):
        fields = dict(max_pages=0, kv_memory_bytes=0, max_adapters=max_adapters, context_length=64, max_batch_rows=2)
        runner = make_runner(saved, model.kernels, **fields)
        runner.allocate_pool(64)
        allocated = []
        runner.allocate_pool = allocated.append
        prepare_device(engine_config(**fields), runner, memory, lambda: ImmediateStream(CPU))
        pages.append(allocated[-1] * runner.page_bytes)
    largest = max((saved / name / "adapter_model.safetensors").stat().st_size for name in NAMES[1:])
    assert pages[0] - pages[1] == pytest.approx(2 * 5 * largest, abs=1024)
