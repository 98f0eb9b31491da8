"""The KV pool takes what weights, activations, graphs and the reserve leave, for injected memory figures."""

from __future__ import annotations

import dataclasses

import pytest
from engine_runs import CPU, MODELS, arrivals_of, run
from shared_prefix_reference import LEADER_READS
from synchronous_stream import ImmediateStream
from tiny_hf_models import randomized

from plait.runtime.batch.batch import Batch
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.executor.gpu import kv_pool_size
from plait.runtime.executor.gpu.kv_pool_size import MIN_RESERVE_BYTES, default_batch_rows
from plait.runtime.executor.gpu.step_launcher import NUM_TRIAL_CAPTURES, prepare_device
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.messages import Finished

MB = 1 << 20
TRIAL_PAGES, BATCH_TOKENS = 64, 40


class CountingStream(ImmediateStream):
    """Counts captures. A capture takes memory as long as its stream lives."""

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__(CPU)
        memory.streams.append(self)
        self.num_captures = 0

    def capture(self, work):
        self.num_captures += 1
        return super().capture(work)


class FakeMemory:
    """Figures of a GPU of `total` bytes whose weights are loaded, with the runner's pool and the graphs of a stream.

    The first graph of a stream takes `first_graph` bytes, each further one `graph` bytes.
    """

    def __init__(self, runner, total, weights=50 * MB, activations=30 * MB, first_graph=9 * MB, graph=2 * MB):
        self.runner, self.streams, self.tokens_of_steps = runner, [], []
        self._total, self._weights, self._activations = total, weights, activations
        self._first_graph, self._graph = first_graph, graph

    def total(self):
        return self._total

    def graph_bytes(self, number):
        return self._first_graph + self._graph * (number - 1) if number else 0

    def free(self):
        graphs = self.graph_bytes(self.streams[-1].num_captures) if self.streams else 0
        return self._total - self._weights - self.runner.num_pages * self.runner.page_bytes - graphs

    def peak_of(self, work):
        forward = self.runner.forward

        def record(batch: Batch):
            self.tokens_of_steps.append((batch.num_tokens, batch.num_logits))
            return forward(batch)

        self.runner.forward = record
        work()
        self.runner.forward = forward
        return self._activations

    def spare(self):
        """What is free in a step, while its activations are allocated."""
        return self.free() - self._activations


@pytest.fixture
def runner(tmp_path):
    randomized(MODELS["Llama"]()).save_pretrained(tmp_path)
    config = engine_config(device="cpu", dtype="float32", max_pages=TRIAL_PAGES, max_batch_tokens=BATCH_TOKENS)
    plain = TorchRunner(config, tmp_path)
    return TorchRunner(config, tmp_path, kernels=dataclasses.replace(plain.kernels, fused=LEADER_READS))


def prepare(runner, memory, **settings):
    return prepare_device(engine_config(device="cpu", **settings), runner, memory, lambda: CountingStream(memory))


def test_the_pool_takes_what_the_largest_step_and_all_graphs_leave(runner):
    memory = FakeMemory(runner, 450 * MB)
    launcher = prepare(runner, memory, max_batch_rows=4)
    assert launcher.max_batch_rows == 4
    trial, final = memory.streams
    assert NUM_TRIAL_CAPTURES <= trial.num_captures < final.num_captures
    # Each number of rows has a sampler's graph too: their number differs a little from the estimate.
    assert 0 <= memory.spare() - MIN_RESERVE_BYTES + 5 * 2 * MB <= 10 * 2 * MB
    assert memory.tokens_of_steps == [(BATCH_TOKENS, BATCH_TOKENS)]
    outcomes = run(runner, arrivals_of(3, n=5), launcher, rows=4)
    assert all(isinstance(outcome.end, Finished) for outcome in outcomes.values())


@pytest.mark.parametrize(
    "more",
    [{"weights": 60 * MB}, {"activations": 40 * MB}, {"first_graph": 19 * MB}],
    ids=lambda more: next(iter(more)),
)
def test_the_pool_is_smaller_by_what_something_else_takes_more(runner, more):
    pages = []
    for figures in ({}, more):
        runner.allocate_pool(TRIAL_PAGES)
        prepare(runner, FakeMemory(runner, 450 * MB, **figures), max_batch_rows=2)
        pages.append(runner.num_pages)
    assert abs((pages[0] - pages[1]) * runner.page_bytes - 10 * MB) <= runner.page_bytes


def test_graphs_that_are_off_take_no_memory(runner):
    memory = FakeMemory(runner, 450 * MB)
    prepare(runner, memory, max_batch_rows=2, cuda_graphs=False)
    assert 0 <= memory.spare() - MIN_RESERVE_BYTES < runner.page_bytes


def test_a_size_that_is_set_needs_no_trial(runner):
    memory = FakeMemory(runner, 450 * MB)
    for setting in ({"max_pages": TRIAL_PAGES}, {"kv_memory_bytes": MB}):
        prepare(runner, memory, max_batch_rows=2, **setting)
        assert runner.num_pages == TRIAL_PAGES and not memory.tokens_of_steps


def test_too_little_memory_is_refused_with_a_reason(runner):
    with pytest.raises(InputError, match="a KV budget of 0 bytes"):
        prepare(runner, FakeMemory(runner, 320 * MB), max_batch_rows=2)


def test_rows_of_a_batch_follow_from_the_pool(runner, monkeypatch):
    assert default_batch_rows(16) == default_batch_rows(32_000) == 64
    assert default_batch_rows(480_000) == default_batch_rows(10**8) == 512
    monkeypatch.setattr(kv_pool_size, "TOKENS_PER_ROW", 1024)
    monkeypatch.setattr(kv_pool_size, "MIN_DEFAULT_ROWS", 8)
    launcher = prepare(runner, FakeMemory(runner, 450 * MB), cuda_graphs=False)
    assert launcher.max_batch_rows == runner.num_pages // 1024 // 8 * 8 > 8
    from_config = run(runner, arrivals_of(3, n=5), launcher, rows=0)
    assert all(isinstance(outcome.end, Finished) for outcome in from_config.values())
