"""Builds an engine loop from a configuration: model runner, sampler, tokenizer, grammar compiler."""

from __future__ import annotations

import os
from pathlib import Path

from plait.constrained import CompilePool
from plait.runtime.config import EngineConfig
from plait.runtime.executor.backend_selection import checkpoint_for_packed_cpu
from plait.runtime.executor.host_machine import trim_heap
from plait.runtime.executor.runner import LoadedRunner, StartupProgress
from plait.runtime.executor.step import AsyncStepLauncher
from plait.runtime.messages import PROTOCOL, EmbeddingInfo, Welcome
from plait.runtime.models.loading.pooling import UnsupportedPooling, read_pooling
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.tokenizer.tokenizer import load_tokenizer
from plait.runtime.transport.base import ServerTransport


def build_engine_loop(
    config: EngineConfig,
    model_path: Path,
    transport: ServerTransport,
    progress: StartupProgress = lambda fraction, doing: None,
) -> EngineLoop:
    """Loads the model and returns a loop that is ready to step.

    Raises ModelError or InputError before starting anything.
    """
    runner, sampler, steps = make_runner(config, model_path, progress)
    progress(1.0, "ready")
    vocabulary = load_tokenizer(model_path, vocab_size=runner.config.vocab_size).vocabulary
    compiler = CompilePool(vocabulary, deadline_s=config.compile_deadline_s, start_eagerly=False)
    compiler.start()
    trim_heap()
    pooling, embeddings = read_pooling(model_path), None
    if not isinstance(pooling, UnsupportedPooling):
        embeddings = EmbeddingInfo(runner.config.hidden_size, pooling.kind, pooling.normalize, pooling.prompt)
    welcome = Welcome(
        protocol=PROTOCOL,
        model_path=str(model_path),
        vocab_size=runner.config.vocab_size,
        context_length=runner.max_session_tokens,
        server_pid=os.getpid(),
        embeddings=embeddings,
        no_embeddings_reason=pooling.reason if isinstance(pooling, UnsupportedPooling) else "",
        can_generate=runner.config.has_lm_head,
    )
    return EngineLoop(config, welcome, runner, sampler, vocabulary, compiler, transport, steps)


def make_runner(
    config: EngineConfig, model_path: Path, progress: StartupProgress = lambda fraction, doing: None
) -> tuple[LoadedRunner, Sampler, AsyncStepLauncher | None]:
    """Loads the model and returns its runner, sampler and launcher. For packed CPU weights, torch is never imported."""
    checkpoint = checkpoint_for_packed_cpu(config, model_path)
    if checkpoint is not None:
        from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
        from plait.runtime.models.loading.cpu_weights import NotPackable

        try:
            return PackedCpuRunner(config, checkpoint, progress), Sampler(), None
        except NotPackable:
            pass  # only for "as-stored": a block's minimum overflows float16, which the file header does not tell
    from plait.runtime.executor.gpu.step_launcher import make_gpu_step_launcher
    from plait.runtime.executor.torch_runner import TorchRunner
    from plait.runtime.sampling.torch_ops import TorchLogitOperations

    runner = TorchRunner(config, model_path, progress)
    steps = make_gpu_step_launcher(
        config, runner, lambda fraction: progress(0.9 + 0.1 * fraction, "capturing decode graphs")
    )
    on_gpu = runner.device.type == "cuda"
    return runner, Sampler(TorchLogitOperations(runner.device)) if on_gpu else Sampler(), steps
