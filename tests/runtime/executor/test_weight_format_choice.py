"""The format in which a CPU runs a folder of safetensors, with the reason that `plait check` prints."""

from __future__ import annotations

import pytest
import torch
from family_cases import FAMILY_CASES

from plait.kernels.cpu.decoder import missing_features
from plait.runtime.config import engine_config
from plait.runtime.executor.backend_selection import resolve_weight_format
from plait.runtime.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-23: the kernels need AVX2")


def chosen(folder, **settings):
    return resolve_weight_format(engine_config(device="cpu", **settings), open_checkpoint(folder))


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_safetensors_run_in_int8_unless_another_format_is_named(dtype, name, tmp_path):
    FAMILY_CASES["llama"].build(head_dim=32).to(dtype).save_pretrained(tmp_path)
    default = chosen(tmp_path)
    assert (default.weight_format, default.packed) == ("int8", True)
    assert f"weights with more bits ({name}) are rounded to int8, a CPU's default for safetensors" in default.reason
    stored = chosen(tmp_path, weights="as-stored")
    assert (stored.weight_format, stored.packed) == ("as-stored", True)
    assert f"the file's own weights ({name}), packed: LLVM" in stored.reason
    assert "a CPU's default" not in chosen(tmp_path, weights="int8").reason
    assert chosen(tmp_path, weights="bf16")[:2] == ("bf16", False)


@pytest.mark.parametrize(("family", "changes"), [("qwen3_moe", {}), ("llama", {"head_dim": 24})])
def test_what_cannot_be_packed_runs_in_torch_with_the_reason(family, changes, tmp_path):
    FAMILY_CASES[family].build(**changes).to(torch.bfloat16).save_pretrained(tmp_path)
    default = chosen(tmp_path)
    assert (default.weight_format, default.packed) == ("bf16", False)
    assert "multiples of 32" in default.reason
