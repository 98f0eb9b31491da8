"""`plait check` says in which format a folder of safetensors runs, and why."""

from __future__ import annotations

import pytest
import torch
from family_cases import FAMILY_CASES

from plait.cli import main
from plait.kernels.cpu.decoder import missing_features

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-23: the kernels need AVX2")


def weights_line(capsys, folder, *options):
    assert main(["check", "--model", str(folder), *options]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weights"))


def test_safetensors_run_in_int8_unless_another_format_is_named(capsys, tmp_path):
    FAMILY_CASES["llama"].build(head_dim=32).to(torch.bfloat16).save_pretrained(tmp_path)
    line = weights_line(capsys, tmp_path)
    assert " int8 (weights with more bits (BF16) are rounded to int8, a CPU's default for safetensors" in line
    assert "packed: numba" in line
    assert " as-stored (the file's own weights (BF16), packed: numba" in weights_line(
        capsys, tmp_path, "--weights", "as-stored"
    )


def test_a_family_without_a_packed_form_is_named(capsys, tmp_path):
    FAMILY_CASES["qwen3_moe"].build().to(torch.bfloat16).save_pretrained(tmp_path)
    line = weights_line(capsys, tmp_path)
    assert " bf16 (" in line and "do not support the family qwen3_moe" in line
