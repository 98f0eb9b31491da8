"""The tokenizer of the embedded model, read by plait and by transformers."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_samples import smollm2_in_transformers

from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate_model())


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    return smollm2_in_transformers()
