"""Finds and loads the draft model of a runtime, and checks that it has the model's vocabulary."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from platform import node

from plait.constrained import Vocabulary
from plait.kernels.cpu.compiler import object_code
from plait.runtime.config import EngineConfig
from plait.runtime.drafts.draft_account import DraftAccount
from plait.runtime.errors import InputError, ModelNotFound
from plait.runtime.executor.host_machine import num_threads
from plait.runtime.executor.runner import LoadedRunner
from plait.runtime.executor.runner_factory import check_draft_allowed, make_draft_runner
from plait.runtime.model_files.fingerprint import model_fingerprint
from plait.runtime.model_files.locate import locate_model
from plait.runtime.scheduler.policy.draft_model import DraftModel
from plait.runtime.tokenizer.tokenizer import load_tokenizer
from plait.runtime.weights.checkpoint import open_checkpoint

MAX_DRAFT_PAGES = 8192  # tokens whose KV the draft model keeps
BFLOAT16_BYTES = 2


def locate_draft(config: EngineConfig, model_path: Path) -> Path:
    """Returns the files of a model's draft model. Raises ModelError, and InputError for a model that has none."""
    check_draft_allowed(config, model_path)
    try:
        return locate_model(config.draft)
    except ModelNotFound as error:
        raise ModelNotFound(f"draft: {error}") from None


def draft_cache_bytes(path: Path) -> int:
    """Returns the bytes of the KV cache of a draft model, as large as it can be. Raises ModelError."""
    config = open_checkpoint(path).config
    return MAX_DRAFT_PAGES * config.num_layers * 2 * config.num_kv_heads * config.head_dim * BFLOAT16_BYTES


def load_draft_model(
    config: EngineConfig, model_path: Path, draft_path: Path, vocabulary: Vocabulary, model_runner: LoadedRunner
) -> DraftModel:
    """Returns the draft model of a model with this vocabulary.

    Raises ModelError, and InputError for a draft model with another vocabulary, or one that no packed CPU kernels
    compute.
    """
    tokenizer = load_tokenizer(draft_path, is_for_ids=True)
    runner = make_draft_runner(config, draft_path, min(MAX_DRAFT_PAGES, model_runner.num_pages))
    if runner.config.vocab_size != tokenizer.vocab_size:
        tokenizer = load_tokenizer(draft_path, vocab_size=runner.config.vocab_size, is_for_ids=True)
    difference = _difference(tokenizer.vocabulary, vocabulary)
    if difference:
        raise InputError(f"draft {str(draft_path)[:200]!r} has another vocabulary than the model: {difference}")
    path = _account_path(config, model_path, draft_path)
    kept = object_code.read(path)
    return DraftModel(
        runner,
        runner.max_session_tokens,
        None if kept is None else DraftAccount.from_bytes(kept),
        partial(object_code.write, path),
    )


def _account_path(config: EngineConfig, model_path: Path, draft_path: Path) -> Path | None:
    """Returns the file, beside the kernels, of what was measured of these models on this machine."""
    depends_on = model_fingerprint(model_path), model_fingerprint(draft_path), num_threads(), node()
    return object_code.cache_path("draft-account", *depends_on, config.weights, config.kv_dtype, config.deterministic)


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
