"""The tokenizer of the embedded model, read by plait and by transformers."""

from __future__ import annotations

from typing import Any

import pytest
from fast_gguf_reader import Reader
from tokenizer_samples import DIGITS_THEN_BYTES
from transformers import AutoTokenizer

from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate_model())


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    """The GGUF tokenizer in transformers, which ignores `pre`; so the published SmolLM2's pre-tokenizer is set."""
    path = locate_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf.GGUFReader", Reader)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = DIGITS_THEN_BYTES
    return tokenizer
