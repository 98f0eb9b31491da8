"""The engine on a GPU, compared with the CPU and with other settings."""

from __future__ import annotations

import gc
import importlib.util

import pytest
import torch

from plait.runtime.executor.gpu.step_launcher import GpuStepLauncher
from plait.runtime.model_files.locate import EMBEDDED_PACKAGE
from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.overlap import OverlapController

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (since 2026-11-21)"),
    pytest.mark.skipif(
        importlib.util.find_spec(EMBEDDED_PACKAGE) is None,
        reason=f"needs the embedded model, package {EMBEDDED_PACKAGE} (since 2026-11-27)",
    ),
]

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]


def greedy(device: str) -> list[list[int]]:
    with Engine(device=device, dtype="float32", check_integrity=True, max_pages=2000, max_batch_tokens=16) as engine:
        calls = []
        for prompt in PROMPTS:
            session = engine.client.open_session()
            session.append(prompt)
            calls.append(session.generate(sampling_params(max_tokens=16, temperature=0.0)))
        return [call.result().token_ids for call in calls]


def test_greedy_tokens_on_the_gpu_equal_those_on_the_cpu() -> None:
    assert greedy("cuda") == greedy("cpu")


def test_sampling_and_logprobs_on_the_gpu() -> None:
    with Engine(device="cuda", max_pages=2000) as engine:
        session = engine.client.open_session()
        session.append("Once upon a time")
        params = sampling_params(max_tokens=8, top_p=0.9, seed=3, logprobs=True, top_logprobs=2, ignore_eos=True)
        result = session.generate(params).result()
        assert len(result.logprobs or []) == 8
        choice = session.select([" yes", " no"]).result().choice
        assert choice is not None
        assert choice.index in (0, 1)


def test_overlapped_steps_do_not_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run one after another, so that all batches, and hence all bits, are equal."""

    def run() -> tuple[list[list[int]], int]:
        with Engine(device="cuda", max_pages=4000, check_integrity=True) as engine:
            steps, outputs = engine.engine_loop.step_executor._async_launcher, []
            assert isinstance(steps, GpuStepLauncher)
            for seed, prompt in enumerate(PROMPTS):
                session = engine.client.open_session()
                session.append(prompt)
                params = sampling_params(max_tokens=80, temperature=0.9, seed=seed, ignore_eos=True)
                outputs.append(session.generate(params).result().token_ids)
            return outputs, steps.num_overlapped

    overlapped, num_overlapped = run()
    assert num_overlapped > 200
    monkeypatch.setattr(OverlapController, "is_worthwhile", property(lambda self: False))
    assert run() == (overlapped, 0)


def test_quantized_weight_formats_give_the_tokens_of_bfloat16() -> None:
    """The embedded file has 4-bit layers and an 8-bit head, which every quantized format keeps."""

    def run(weight_format: str) -> tuple[list[list[int]], int]:
        gc.collect()
        before = torch.cuda.memory_allocated()
        with Engine(device="cuda", weights=weight_format, max_pages=2000, check_integrity=True) as engine:
            used = torch.cuda.memory_allocated() - before
            calls = []
            for prompt in (*PROMPTS, PROMPTS[1] + " there was" * 400):  # the last prompt has many rows
                session = engine.client.open_session()
                session.append(prompt)
                calls.append(session.generate(sampling_params(max_tokens=16, temperature=0.0, ignore_eos=True)))
            return [call.result().token_ids for call in calls], used

    (bf16, bf16_bytes), (stored, stored_bytes) = run("bf16"), run("as-stored")
    assert sum(a[:6] == b[:6] for a, b in zip(bf16, stored, strict=True)) >= 3  # sums have another order
    assert stored_bytes < bf16_bytes - 100e6
    assert sum(a[:6] == b[:6] for a, b in zip(stored, run("int4")[0], strict=True)) >= 4


def test_prefix_groups_do_not_change_most_outputs() -> None:
    """Sums have another order, so that an output may differ where two tokens are almost equally likely."""
    text = "The history of the sea, told by those who sailed it. " * 60

    def run(prefix_groups: bool) -> tuple[list[list[int]], int]:
        with Engine(device="cuda", max_pages=20000, check_integrity=True, prefix_groups=prefix_groups) as engine:
            session, calls = engine.client.open_session(), []
            session.append(text)
            for i, child in enumerate(session.fork(24)):
                child.append(f" Chapter {i}: {PROMPTS[i % 4]}")
                calls.append(child.generate(sampling_params(max_tokens=24, temperature=0.0, ignore_eos=True)))
            outputs = [call.result().token_ids for call in calls]
            return outputs, engine.client.status().shared_kv_tokens

    (grouped, num_saved_reads), (ungrouped, num_saved_without) = run(True), run(False)
    assert num_saved_reads > 10 * 24 * 128 and num_saved_without == 0
    assert sum(a[:8] == b[:8] for a, b in zip(grouped, ungrouped, strict=True)) >= 18
