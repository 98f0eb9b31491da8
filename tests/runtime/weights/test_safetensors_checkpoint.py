"""Weights from safetensors folders, compared with the models that transformers saved, and damaged folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_llama_checkpoints import save_tiny_llama

from plait.runtime.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.parallel_read import ParallelReader, Readers

F32 = torch.float32
STORED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def copy_folder(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy", dirs_exist_ok=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_safetensors_equal_the_saved_model(tmp_path: Path, tied: bool, bias: bool, shard: str) -> None:
    model = save_tiny_llama(tmp_path, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, shard=shard)
    weights = open_checkpoint(tmp_path)
    expected = {name: value for name, value in model.state_dict().items() if not tied or "lm_head" not in name}
    assert set(weights.names()) == set(expected)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard != "1GB")
    for name, value in expected.items():
        assert torch.equal(weights.tensor(name, F32, "cpu"), value), name
    assert weights.tensor("model.norm.weight", torch.bfloat16, "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_model_saved_without_an_output_head(tmp_path: Path, tied: bool) -> None:
    model = save_tiny_llama(tmp_path / "complete", tie_word_embeddings=tied)
    model.model.save_pretrained(tmp_path / "bare")
    weights = open_checkpoint(tmp_path / "bare")
    assert weights.config.has_lm_head == tied and weights.config.tie_word_embeddings
    expected = {name: value for name, value in model.state_dict().items() if "lm_head" not in name}
    assert set(weights.names()) == set(expected)
    for name, value in expected.items():
        assert torch.equal(weights.tensor(name, F32, "cpu"), value), name
    file = tmp_path / "complete/model.safetensors"  # normal names, but the head is missing
    save_file({name: value for name, value in load_file(file).items() if "lm_head" not in name}, file)
    if not tied:
        with pytest.raises(CorruptModel, match="lm_head"):
            open_checkpoint(tmp_path / "complete")


def test_tensors_of_a_gpu_are_read_by_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handle of safetensors reads them, which would use one thread and memory that is not pinned."""
    asked, reader = [], ParallelReader(torch.device("cpu"))
    monkeypatch.setattr(Readers, "of", lambda self, device: (asked.append(device), reader)[1])
    weights = open_checkpoint(folder)
    for name in weights.names():
        found = weights.tensor(name, F32, torch.device("cuda", 0))
        assert torch.equal(found, weights.tensor(name, F32, "cpu"))
    assert asked == [torch.device("cuda", 0)] * len(weights.names())
    assert {device for _, device in weights.handles} == {None, "cpu"}
    reader.close()


def test_missing_tensors_and_wrong_shapes_are_rejected(folder: Path, tmp_path: Path) -> None:
    copy = copy_folder(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"no tensor 'model\.norm\.weight'"):
        open_checkpoint(copy)
    save_file(tensors | {"model.norm.weight": norm[:-1]}, copy / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"'model\.norm\.weight' has the shape \(63,\)"):
        open_checkpoint(copy)
    save_file(tensors | {"model.norm.weight": norm.to(torch.int8)}, copy / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="is stored as I8"):
        open_checkpoint(copy).tensor("model.norm.weight", F32, "cpu")
    with pytest.raises(CorruptModel, match="no tensor 'nothing'"):
        open_checkpoint(folder).tensor("nothing", F32, "cpu")
    with pytest.raises(UnsupportedModel, match="I8; plait reads F32, F16, BF16"):
        open_checkpoint(copy).raw_blocks("model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_raw_blocks_are_the_stored_numbers(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    copy = copy_folder(folder, tmp_path)
    tensors = {name: value.to(dtype) for name, value in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    weights = open_checkpoint(copy)
    for name, value in tensors.items():
        stored_type, rows, shape = weights.raw_blocks(name)
        assert STORED_TYPES[stored_type] == dtype and shape == tuple(value.shape)
        assert torch.equal(torch.from_numpy(rows.copy()).view(dtype).reshape(shape), value)
        assert torch.equal(torch.from_numpy(weights.float32_array(name)), value.float())


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "x.bin", 3, "missing.safetensors"])
def test_index_with_a_file_outside_the_folder_is_rejected(folder: Path, tmp_path: Path, file: Any) -> None:
    copy = copy_folder(folder, tmp_path)
    index = {"weight_map": {"model.embed_tokens.weight": file}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound if file == "missing.safetensors" else CorruptModel):
        open_checkpoint(copy)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_folders_raise_model_errors(folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    copy = copy_folder(folder, tmp_path)
    path = copy / data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, min(len(content), 2500) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=6))
        content[at : at + len(patch)] = patch
    path.write_bytes(content)
    try:
        weights = open_checkpoint(copy)
        for name in weights.names():
            weights.tensor(name, F32, "cpu")
            weights.float32_array(name)
    except ModelError as error:
        assert str(error)  # noqa: PT017 (no error at all is fine too: a changed number may be sound)


def test_missing_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        open_checkpoint(tmp_path)
