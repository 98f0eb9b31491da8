"""Puts a scheduler together from a configuration: model, tokenizer, sampler, grammar compiler, link.

Knows: what is needed and in which order. Must not know: how any of it works.
"""

from __future__ import annotations

import os
from pathlib import Path

from plait.constrained import CompilePool
from plait.runtime.config import EngineConfig
from plait.runtime.flight import DeviceSteps
from plait.runtime.machine import give_back_memory
from plait.runtime.messages import PROTOCOL, Embeddings, Welcome
from plait.runtime.placing import packed_checkpoint
from plait.runtime.running import LoadedRunner, Progress
from plait.runtime.sampler import Sampler
from plait.runtime.scheduler.scheduler import Link, Scheduler
from plait.runtime.tokenizer.tokenizer import load_tokenizer
from plait.runtime.weights.pooling import NoPooling, read_pooling


def build_scheduler(
    config: EngineConfig, model_path: Path, link: Link, progress: Progress = lambda share, doing: None
) -> Scheduler:
    """A scheduler that is ready to step. Raises ModelError or InputError before anything is started."""
    runner, sampler, steps = make_runner(config, model_path, progress)
    progress(1.0, "ready")
    vocabulary = load_tokenizer(model_path, width=runner.config.vocab_size).vocabulary
    compiler = CompilePool(vocabulary, deadline_s=config.compile_deadline_s, at_once=False)
    compiler.start()
    give_back_memory()
    pooling, embeddings = read_pooling(model_path), None
    if not isinstance(pooling, NoPooling):
        embeddings = Embeddings(runner.config.hidden_size, pooling.kind, pooling.normalize, pooling.prompt)
    welcome = Welcome(
        protocol=PROTOCOL,
        model_path=str(model_path),
        vocab_size=runner.config.vocab_size,
        context_length=runner.max_session_tokens,
        server_pid=os.getpid(),
        embeddings=embeddings,
        no_embeddings=pooling.why if isinstance(pooling, NoPooling) else "",
        generates=runner.config.has_head,
    )
    return Scheduler(config, welcome, runner, sampler, vocabulary, compiler, link, steps)


def make_runner(
    config: EngineConfig, model_path: Path, progress: Progress = lambda share, doing: None
) -> tuple[LoadedRunner, Sampler, DeviceSteps | None]:
    """The model on its device, and what samples there. Packed weights go without torch, which is then never loaded."""
    checkpoint = packed_checkpoint(config, model_path)
    if checkpoint is not None:
        from plait.runtime.models.packed import NotStored
        from plait.runtime.packed_runner import PackedRunner

        try:
            return PackedRunner(config, checkpoint, progress), Sampler(), None
        except NotStored:
            pass  # "as-stored" alone raises it: a block whose minimum float16 cannot hold, which no header tells
    from plait.runtime.gpu.logit_operations import TorchOperations
    from plait.runtime.gpu.steps import gpu_steps
    from plait.runtime.model_runner import ModelRunner

    runner = ModelRunner(config, model_path, progress)
    steps = gpu_steps(config, runner, lambda share: progress(0.9 + 0.1 * share, "capturing decode graphs"))
    on_gpu = runner.device.type == "cuda"
    return runner, Sampler(TorchOperations(runner.device)) if on_gpu else Sampler(), steps
