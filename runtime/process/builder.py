"""Builds the engine loop of a runtime process: model runner, tokenizer, grammar compiler, scheduler, transport."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from plait.constrained import CompilePool
from plait.constrained.compile_service.grammar_builds import warm_up_pieces
from plait.constrained.spec_file import SpecFile
from plait.runtime.config import DEFAULT_BATCH_ROWS, EngineConfig
from plait.runtime.errors import PlaitError
from plait.runtime.executor.host_machine import trim_heap
from plait.runtime.executor.runner import StartupProgress
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.messages import PROTOCOL, EmbeddingInfo, Welcome
from plait.runtime.model_files.fingerprint import model_fingerprint
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.models.loading.pooling import UnsupportedPooling, read_pooling
from plait.runtime.process.draft_files import locate_draft
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from plait.runtime.transport.base import ServerTransport


def build_engine_loop(
    config: EngineConfig,
    model_path: Path,
    transport: ServerTransport,
    progress: StartupProgress = lambda fraction, doing: None,
) -> EngineLoop:
    """Returns an engine loop that is ready to step. Raises ModelError or InputError before it starts any process."""
    draft_path = locate_draft(config, model_path) if config.draft else None
    file = None if model_path.is_dir() else open_gguf(model_path)  # kept open, so that all readers share its header
    with ThreadPoolExecutor(1) as beside:  # a tokenizer takes 0.4 s
        loading = list[Future[Tokenizer | None]]()
        runner, sampler, launcher = make_runner(
            config,
            model_path,
            progress,
            lambda: loading.append(beside.submit(_try_load_tokenizer, model_path, config.warm_constraints)),
        )
        tokenizer = loading[0].result() if loading else None
    if tokenizer is None or tokenizer.vocab_size != runner.config.vocab_size:
        tokenizer = load_tokenizer(model_path, vocab_size=runner.config.vocab_size, is_for_ids=True)
    draft_model = None
    if draft_path is not None:
        from plait.runtime.process.draft_model import load_draft_model  # imports the compiler of the CPU kernels

        draft_model = load_draft_model(config, model_path, draft_path, tokenizer.vocabulary, runner)
    vocabulary = tokenizer.vocabulary
    compiler = CompilePool(
        vocabulary,
        workers=2,
        spares=1,
        deadline_s=config.compile_deadline_s,
        start_eagerly=False,
        in_place=True,
        tenant_weights=config.tenant_weights,
        spec_file=SpecFile(Path(config.constraint_file)) if config.constraint_file else None,
    )
    if config.warm_constraints:
        compiler.builds.warm_up()  # what was not built beside the weights
    compiler.start()
    progress(1.0, "ready")
    pooling, embeddings = read_pooling(model_path), None
    del file
    trim_heap()
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
        chat_template=config.chat_template,
        model_fingerprint=model_fingerprint(model_path),
        adapters={} if runner.adapter_pool is None else dict(runner.adapter_pool.names),
        max_batch_rows=config.max_batch_rows or (DEFAULT_BATCH_ROWS if launcher is None else launcher.max_batch_rows),
    )
    return EngineLoop(config, welcome, runner, sampler, vocabulary, compiler, transport, launcher, draft_model)


def _try_load_tokenizer(model_path: Path, warm_constraints: bool) -> Tokenizer | None:
    """Loads the tokenizer for the vocabulary size that its own files state; None if that fails.

    warm_constraints: also builds what constraints need of it.
    """
    try:
        tokenizer = load_tokenizer(model_path, is_for_ids=True)
        for build in warm_up_pieces(tokenizer.vocabulary) if warm_constraints else ():
            build()
    except PlaitError:
        return None
    return tokenizer
