"""The loader of packed CPU weights raises for models that the packed decoder cannot compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_cases import FAMILY_CASES

from plait.runtime.models.loading.cpu_weights import load_packed_decoder
from plait.runtime.weights.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("family", "changes", "phrase"),
    [
        ("qwen3_moe", {}, "40 inputs are not a multiple of 32"),
        ("llama", {"mlp_bias": True}, "does not use .*mlp.*bias"),
        ("llama", {"attention_bias": True}, "does not use .*o_proj.bias"),
    ],
)
def test_a_model_beyond_the_packed_decoder_is_an_error(
    family: str, changes: dict[str, Any], phrase: str, tmp_path: Path
) -> None:
    FAMILY_CASES[family].build(num_hidden_layers=1 if family == "llama" else 3, **changes).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=phrase):
        load_packed_decoder(checkpoint.config, checkpoint, "int8", threads=1)
