"""Loads the draft model of a runtime, and checks that it has the model's vocabulary."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from plait.constrained import Vocabulary
from plait.kernels.cpu.compiler import object_code
from plait.runtime.config import MTP, EngineConfig
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.errors import InputError
from plait.runtime.executor.backend_selection import checkpoint_for_packed_cpu
from plait.runtime.executor.host_machine import num_threads
from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.executor.runner import LoadedRunner
from plait.runtime.executor.runner_factory import make_draft_runner
from plait.runtime.model_files.fingerprint import model_fingerprint
from plait.runtime.models.draft_heads.eagle3_config import is_eagle3
from plait.runtime.models.draft_heads.eagle3_loading import load_eagle3
from plait.runtime.models.draft_heads.head import DraftHead
from plait.runtime.models.draft_heads.mtp import load_mtp
from plait.runtime.process.draft_files import MAX_DRAFT_PAGES, open_mtp
from plait.runtime.scheduler.policy.draft_model import DraftModel
from plait.runtime.scheduler.policy.guessing_model import GuessingModel
from plait.runtime.scheduler.policy.head_draft import HeadDraft
from plait.runtime.tokenizer.tokenizer import load_tokenizer


def load_draft_model(
    config: EngineConfig, model_path: Path, draft_path: Path, vocabulary: Vocabulary, model_runner: LoadedRunner
) -> GuessingModel[Any]:
    """Returns the draft model of a model with this vocabulary.

    Raises ModelError, and InputError for a draft model with another vocabulary, or one that no packed CPU kernels
    compute, and for a head that does not fit.
    """
    path = _account_path(config, model_path, draft_path)
    content = object_code.read(path)
    kept, keep = None if content is None else DraftAccount.from_bytes(content), partial(object_code.write, path)
    if config.draft == MTP or is_eagle3(draft_path):
        checkpoint = checkpoint_for_packed_cpu(config, model_path)
        if checkpoint is None or not isinstance(model_runner, PackedCpuRunner):
            raise InputError("draft: a head is for a model whose weights are packed for a CPU")
        max_length = min(MAX_DRAFT_PAGES, model_runner.max_session_tokens)
        head: DraftHead
        if config.draft == MTP:
            head = load_mtp(open_mtp(model_path), checkpoint, model_runner.model.logits, max_length)
        else:
            head = load_eagle3(draft_path, checkpoint, max_length)
        return HeadDraft(head, model_runner, kept, keep)
    tokenizer = load_tokenizer(draft_path, is_for_ids=True)
    runner = make_draft_runner(config, draft_path, min(MAX_DRAFT_PAGES, model_runner.num_pages))
    if runner.config.vocab_size != tokenizer.vocab_size:
        tokenizer = load_tokenizer(draft_path, vocab_size=runner.config.vocab_size, is_for_ids=True)
    difference = _difference(tokenizer.vocabulary, vocabulary)
    if difference:
        raise InputError(f"draft {str(draft_path)[:200]!r} has another vocabulary than the model: {difference}")
    return DraftModel(runner, runner.max_session_tokens, kept, keep)


def _account_path(config: EngineConfig, model_path: Path, draft_path: Path) -> Path | None:
    """Returns the file, beside the kernels, of what was measured of these models on such a processor."""
    name = "mtp-account" if config.draft == MTP else "draft-account"
    depends_on = model_fingerprint(model_path), model_fingerprint(draft_path), num_threads()
    return object_code.cache_path(name, *depends_on, config.weights, config.kv_dtype, config.deterministic)


def _difference(drafts: Vocabulary, models: Vocabulary) -> str:
    """Returns where two vocabularies differ, for an error; "" if a token's id means the same in both."""
    if len(drafts) != len(models):
        return f"{len(drafts)} tokens, not {len(models)}"
    pairs = zip(drafts.token_bytes, models.token_bytes, strict=True)
    for token, (of_draft, of_model) in enumerate(pairs):
        if of_draft != of_model or drafts.control_texts.get(token) != models.control_texts.get(token):
            return f"token {token} is {_named(drafts, token)}, not {_named(models, token)}"
    return ""


def _named(vocabulary: Vocabulary, token: int) -> str:
    return repr(vocabulary.control_texts.get(token) or vocabulary.token_bytes[token])
