"""What needs torch, where it is not installed: one error at the start of a runtime, which says what to install."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from tiny_llama_checkpoints import save_tiny_llama

from plait.runtime import torch_import
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.executor import backend_selection, host_machine
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process import unused_gpu
from plait.runtime.process.engine import Engine
from plait.runtime.torch_import import require_torch
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.gguf_checkpoint import GGUFCheckpoint

CPU_COMMAND = r"pip install 'plait\[torch\]' --extra-index-url https://download\.pytorch\.org/whl/cpu$"
GPU_COMMAND = r"pip install 'plait\[gpu\]'$"


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    monkeypatch.setattr(torch_import.platform, "system", lambda: "Linux")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, f"device='cuda' needs torch.*{GPU_COMMAND}"),
        ({"device": "cuda:1", "weights": "bf16"}, f"weights='bf16' needs torch.*{GPU_COMMAND}"),
        ({"device": "mps"}, f"device='mps' needs torch.*{GPU_COMMAND}"),
        ({"weights": "bf16"}, f"weights='bf16' needs torch.*{CPU_COMMAND}"),
        ({"dtype": "float32"}, f"dtype='float32' needs torch.*{CPU_COMMAND}"),
        ({"dtype": "float16"}, f"dtype='float16' needs torch.*{CPU_COMMAND}"),
        ({"weights": "int4"}, rf"weights='int4' needs torch \(to round .* stored as Q8_0\).*{CPU_COMMAND}"),
    ],
)
def test_settings_that_need_torch(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_runner(engine_config(max_pages=16, **settings), locate_model())


def test_a_model_that_cannot_be_packed_names_the_reason(folder: Path) -> None:
    with pytest.raises(InputError, match=rf"this model needs torch \(.+\)\. It is not installed: {CPU_COMMAND}"):
        make_runner(engine_config(max_pages=16), folder)


def test_an_engine_raises_it_before_it_has_a_client() -> None:
    with pytest.raises(InputError, match=f"needs torch.*{CPU_COMMAND}"):
        Engine(weights="bf16", max_pages=16)


def test_headers_of_safetensors_are_read_without_torch(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert {checkpoint.stored_type(name) for name in checkpoint.names()} == {"F32"}


def test_a_tensor_that_only_torch_reads_is_found_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: GGUFCheckpoint, name: str) -> None:
        import torch

        raise AssertionError(torch)

    monkeypatch.setattr(GGUFCheckpoint, "float32_array", read)
    with pytest.raises(InputError, match=rf"this model needs torch \(its file has tensors .*{CPU_COMMAND}"):
        make_runner(engine_config(max_pages=16), locate_model())


def test_the_device_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there may be a GPU: /dev/dxg exists on every Windows machine with a Linux subsystem."""
    monkeypatch.setattr(backend_selection, "may_have_gpu", lambda: True)
    assert backend_selection.resolve_device_type("auto") == "cpu"


def test_a_gpu_that_is_not_used_causes_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(host_machine, "GPU_DEVICE_NODES", (str(tmp_path / "none"),))
        unused_gpu.warn_of_unused_gpu("auto")
        monkeypatch.setattr(host_machine, "GPU_DEVICE_NODES", (str(tmp_path),))
        unused_gpu.warn_of_unused_gpu("cpu")
    with pytest.warns(UserWarning, match=r"torch is not installed.*pip install 'plait\[gpu\]'"):
        unused_gpu.warn_of_unused_gpu("auto")


def test_a_damaged_torch_is_reported_as_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    with pytest.raises(InputError, match=r"x needs torch\. It is installed, but cannot be imported: libcudart"):
        require_torch("x")
    (tmp_path / "torch.py").write_text("import a_package_that_torch_needs")
    with pytest.raises(InputError, match="It is installed, but cannot be imported: No module named 'a_package"):
        require_torch("x")


def test_other_systems_need_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_import.platform, "system", lambda: "Darwin")
    assert torch_import.install_command() == "pip install 'plait[torch]'"
