"""`plait check` where torch is not installed: it reports that, what needs it, and whether the model can run."""

from __future__ import annotations

import sys

import pytest

from plait.cli import main
from plait.runtime.executor import host_machine


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("PLAIT_MODEL", raising=False)


def lines_of(text):
    return dict(line.split("  ", 1) for line in text.splitlines())


def test_the_embedded_model_can_run(capsys):
    assert main(["check"]) == 0
    lines = {name: value.strip() for name, value in lines_of(capsys.readouterr().out).items()}
    assert lines["device"].startswith("cpu (") and lines["dtype"] in ("bfloat16", "float32")
    assert "LLVM" in lines["kernels: packed weights"]
    assert "torch" in lines["kernels: other weights"]
    assert lines["torch"].startswith("not installed; needed for GPUs, ") and "pip install 'plait[" in lines["torch"]
    assert lines["weights"].startswith("as-stored (")


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_weights_that_need_torch_cannot(capsys, weights):
    assert main(["check", "--weights", weights]) == 1
    output = capsys.readouterr()
    assert "SmolLM2" in output.out
    assert f"weights='{weights}' needs torch" in output.err and "pip install 'plait[torch]'" in output.err


def test_the_command_for_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(host_machine, "GPU_DEVICE_NODES", (str(tmp_path),))
    assert main(["check"]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert "pip install 'plait[gpu]'" in lines["device"] and "pip install 'plait[gpu]'" in lines["torch"]


def test_a_damaged_torch_is_reported(capsys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13')")
    assert main(["check"]) == 0
    assert "It is installed, but cannot be imported: libcudart" in capsys.readouterr().out
