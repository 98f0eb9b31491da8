"""All graphs of a GPU's steps are captured before the first request, and the page table has 32-bit offsets."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_runs import CPU, MODELS, PAGES, WORDS, arrivals_of, run
from shared_prefix_reference import LEADER_READS
from synchronous_stream import ImmediateStream
from tiny_hf_models import randomized

from plait.kernels.layout import AttentionShape
from plait.kernels.triton.attention.tile_config import GpuSpec, decode_tile_rows
from plait.kernels.triton.linear.float8_matmul import float8_matmul_config
from plait.kernels.triton.linear.quantized_linear import MAX_WIDENED_FLOAT8_ROWS
from plait.runtime.config import engine_config
from plait.runtime.executor import torch_device
from plait.runtime.executor.gpu.cuda_graphs import MAX_PAGE_TABLE_ENTRIES, MAX_Q_LEN, max_graph_rows
from plait.runtime.executor.gpu.page_table import DevicePageTable
from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling_params import sampling_params


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    randomized(MODELS["Llama"]()).save_pretrained(folder)
    config = engine_config(device="cpu", dtype="float32", max_pages=PAGES, max_batch_tokens=24)
    return TorchRunner(
        config, folder, kernels=dataclasses.replace(TorchRunner(config, folder).kernels, fused=LEADER_READS)
    )


def test_no_step_captures_a_graph_after_the_start(runner):
    """Steps of one token, of forced tokens, with prompts, and over shared prefixes.

    Without captures at the start, they capture.
    """
    arrivals = arrivals_of(4, n=8)
    for i in range(2):
        gen = Generate(70 + i, 70 + i, sampling_params(max_tokens=3, temperature=0.0, ignore_eos=True))
        arrivals += [(4 + 3 * i, request) for request in (Open(70 + i), Append(70 + i, [3, 1, 2] * 15), gen)]
    for i in range(4):
        gen = Generate(50 + i, 50 + i, sampling_params(seed=i, temperature=2.0), WORDS)
        arrivals += [(2 + i, request) for request in (Open(50 + i), Append(50 + i, [2 + i] * 5), gen)]
    late = []
    for is_captured in (True, False):
        steps = GpuStepLauncher(runner, 4, ImmediateStream(CPU))
        if is_captured:
            with torch.inference_mode():
                steps.graphs.capture_all()
            assert all(steps.graphs.is_captured(key) for key in steps.graphs.all_keys())
        run(runner, arrivals, steps, rows=4)
        assert {key.q_len for key in steps.graphs.graphs} == {1, MAX_Q_LEN} and steps.num_graph_replays > 8
        assert steps.num_piecewise >= 3
        late.append(steps.graphs.num_late_captures)
    assert late[0] == 0 < late[1]


def test_all_graphs_write_the_same_logits(runner):
    """One buffer in the model's dtype, and one captured sampler for all graphs of as many rows."""
    steps = GpuStepLauncher(runner, 8, ImmediateStream(CPU))
    read = []
    steps.sampling.sample = lambda logits: read.append((logits.data_ptr(), len(logits), logits.dtype))
    with torch.inference_mode():
        steps.graphs.capture_all()
        num_captured = len(read)
        for graph in steps.graphs.graphs.values():
            graph.sample()
    assert {place for place, _, _ in read} == {steps.graphs._logits.data_ptr()}
    assert {dtype for _, _, dtype in read} == {runner.dtype}
    assert num_captured == len({rows for _, rows, _ in read}) < len(steps.graphs.graphs)


def test_graphs_have_only_rows_whose_pages_fit_the_table():
    assert max_graph_rows(512, 8192) == 512
    for length in (1 << 17, 1 << 24, 1 << 29):
        rows = max_graph_rows(4096, length)
        assert rows == 1 or (rows + 1) * length <= MAX_PAGE_TABLE_ENTRIES < 1 << 31
    with pytest.raises(ValueError, match="32 bits"):
        DevicePageTable(2047, 1 << 20, ImmediateStream(CPU))


def test_warm_up_runs_every_height_of_decode_tile(runner, monkeypatch):
    """The kernel is compiled for a tile's height, which depends on the most new tokens of a row."""
    monkeypatch.setattr(runner, "device", torch.device("cuda"))
    counts = [count for count in runner._warm_up_counts() if count <= MAX_Q_LEN]
    for group in range(1, 17):
        shape = AttentionShape(group, 1, 64, torch.bfloat16)
        heights = {decode_tile_rows(shape, tokens) for tokens in range(1, MAX_Q_LEN + 1)}
        assert {decode_tile_rows(shape, count) for count in counts} == heights


@pytest.mark.parametrize("num_sms", [58, 108, 132, 148])
def test_warm_up_runs_every_tile_of_fp8_products(runner, monkeypatch, num_sms):
    monkeypatch.setattr(runner, "device", torch.device("cuda"))
    monkeypatch.setattr(runner, "weight_format", "as-stored")
    monkeypatch.setattr(runner, "max_batch_tokens", 8192)
    counts = [count for count in runner._warm_up_counts() if count > MAX_WIDENED_FLOAT8_ROWS]
    gpu = GpuSpec(90, num_sms)
    for out_features in [*range(1024, 16384, 512), 128_256]:
        used = {float8_matmul_config(rows, out_features, gpu) for rows in range(MAX_WIDENED_FLOAT8_ROWS + 1, 8193)}
        assert {float8_matmul_config(rows, out_features, gpu) for rows in counts} == used, out_features


def test_a_cuda_device_becomes_the_current_one_of_a_thread(runner, monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_device.torch, "empty", lambda *shape, device: None)
    assert torch_device.choose_device("cuda:1") == torch.device("cuda:1")
    assert torch_device.choose_device("auto") == torch_device.choose_device("cuda") == torch.device("cuda:2")
    monkeypatch.setattr(runner, "device", torch.device("cuda:3"))
    runner.use_device()
    assert used == [torch.device("cuda", index) for index in (1, 2, 2, 3)]
    torch_device.choose_device("cpu")
    assert len(used) == 4


def test_the_thread_of_the_engine_uses_the_device():
    import threading

    from plait.runtime.transport.local import LocalClientTransport, LocalServerTransport

    calls, done, server = [], threading.Event(), LocalServerTransport()

    def step() -> None:
        calls.append(("step", threading.get_ident()))
        done.set()
        server.receive(10.0, [])

    client = LocalClientTransport(None, server, step, lambda: calls.append(("begin", threading.get_ident())))
    client.start(lambda reply: None, lambda reason: None)
    assert done.wait(60)
    client.close()
    assert [name for name, _ in calls[:2]] == ["begin", "step"]
    assert calls[0][1] == calls[1][1] != threading.get_ident()
    server.close()
