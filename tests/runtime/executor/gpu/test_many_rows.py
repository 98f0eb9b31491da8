"""Steps of up to 1,024 rows run in graphs, with and without prompts beside them; steps of more rows do not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from delayed_device import DelayedStream
from engine_runs import MODELS
from shared_prefix_reference import LEADER_READS
from tiny_hf_models import randomized

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.gpu.cuda_graphs import PIECEWISE, GraphKey
from plait.runtime.executor.gpu.step_launcher import MAX_GRAPH_ROWS, GpuStepLauncher
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence

MAX_ROWS = 1100
CACHED = 1  # tokens of a decoding row


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    randomized(MODELS["Llama"]()).save_pretrained(folder)
    config = engine_config(device="cpu", dtype="float32", max_pages=4096, max_batch_tokens=4096, prefix_groups=False)
    kernels = dataclasses.replace(TorchRunner(config, folder).kernels, fused=LEADER_READS)
    return TorchRunner(config, folder, kernels=kernels)


def batch_of(runner, num_decoding, *prompts):
    """Rows that decode behind different tokens, then prompts of so many tokens. All sample."""
    fill, batch, pages = Batch(4096), Batch(4096), np.arange(4096, dtype=np.int32)
    for number, count in enumerate([1] * num_decoding + list(prompts)):
        cached = CACHED if number < num_decoding else 0
        seq = Sequence(CacheNamespace(), [1 + (number >> i) % 3 for i in range(cached + count)])
        seq.pages.extend(pages[: cached + count].copy())
        pages = pages[cached + count :]
        if cached:
            fill.add(Request(None, seq, 0, len(seq)), 0, cached)
        batch.add(Request(None, seq, 0, len(seq) - 1), cached, count)
    batch.sampled_requests = [(index, None) for index in range(len(batch.rows))]
    runner.forward(fill)
    return batch


@pytest.mark.parametrize(
    ("num_decoding", "prompts", "key"),
    [
        (513, (), GraphKey(576, 1)),
        (1000, (), GraphKey(1024, 1)),
        (700, (200, 9), GraphKey(1024, PIECEWISE)),
        (1000, (250, 250, 30), GraphKey(1536, PIECEWISE)),
        (MAX_GRAPH_ROWS + 1, (), None),
        (1000, (250, 250, 250, 250, 250), None),
    ],
)
def test_steps_of_many_rows_have_the_logits_of_eager_steps(runner, num_decoding, prompts, key):
    steps, batch = GpuStepLauncher(runner, MAX_ROWS, DelayedStream(0.0)), batch_of(runner, num_decoding, *prompts)
    assert steps.graphs.graph_key(batch) == key
    assert key is None or key in steps.graphs.all_keys()
    step = steps.launch(batch, overlapped=False)
    steps.stream.run_until(steps.stream.num_enqueued)
    assert steps.num_graph_replays == (key is not None)
    plain = runner.logits(runner.forward(batch), {})
    torch.testing.assert_close(step._forward.logits(), plain, atol=1e-4, rtol=1e-4)


def test_a_step_that_fills_its_graph_has_the_bits_of_an_eager_step(runner):
    steps, batch = GpuStepLauncher(runner, MAX_ROWS, DelayedStream(0.0)), batch_of(runner, 480, 30, 2)
    assert steps.graphs.graph_key(batch) == GraphKey(512, PIECEWISE)
    steps.launch(batch, overlapped=False)
    steps.stream.run_until(steps.stream.num_enqueued)
    with torch.inference_mode():
        eager = runner.run_layers(runner.prepare_inputs(batch))
    assert torch.equal(steps.graphs._piece_buffers.hidden[:512], eager)
