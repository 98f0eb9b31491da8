"""Tokenizer files that make the `tokenizers` package panic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.constrained import Vocabulary
from plait.runtime.errors import CorruptModel
from plait.runtime.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(params=["##", "a-long-prefix"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder whose tokenizer has merges that are shorter than its `continuing_subword_prefix`."""
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "continuing_subword_prefix": request.param,
    }
    source = {"version": "1.0", "model": model, "decoder": {"type": "ByteLevel"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return tmp_path


def test_a_panic_in_a_models_tokenizer_is_a_corrupt_model(folder: Path) -> None:
    with pytest.raises(CorruptModel, match=r"tokenizer\.json is inconsistent; download it again"):
        load_tokenizer(folder)


def test_a_panic_in_a_vocabularys_tokenizer_is_a_value_error(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        Vocabulary.from_tokenizer(folder)


def test_other_interruptions_are_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("plait.runtime.tokenizer.from_hf.models", SimpleNamespace(BPE=interrupt))
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(folder)
