"""Quantized folders with missing, wrong and contradictory tensors: clear errors, and no wrong weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import CASES, save_quantized
from safetensors.torch import load_file, save_file

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.weights.checkpoint import open_checkpoint

Q = "model.layers.0.self_attn.q_proj"
USED = ("GPTQ 4, act-order", "AWQ", "fp8, blocks", "fp8, tensor, static", "W4A16, asymmetric", "W8A8", "NF4, nested")
USED += ("bitsandbytes int8", "MXFP4")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for i, name in enumerate(USED):
        found[name] = tmp_path_factory.mktemp(f"case{i}")
        save_quantized(found[name], CASES[name])
    return found


def altered(
    folder: Path, to: Path, change: Callable[[Tensors], object], config: dict[str, object] | None = None
) -> Path:
    copy = Path(shutil.copytree(folder, to / "copy", dirs_exist_ok=True))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    described = json.loads((copy / "config.json").read_text())
    described["quantization_config"] |= config or {}
    (copy / "config.json").write_text(json.dumps(described))
    return copy


@pytest.mark.parametrize("name", USED)
def test_missing_tensors_and_wrong_shapes(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    stored = load_file(folders[name] / "model.safetensors")
    optional = (".g_idx", ".input_scale", ".weight_format")
    suffixes = [key.removeprefix(Q) for key in stored if key.startswith(Q) and not key.endswith(optional)]
    assert len(suffixes) >= 2
    for suffix in suffixes:
        copy = altered(folders[name], tmp_path, lambda tensors, key=Q + suffix: tensors.pop(key))
        with pytest.raises(CorruptModel, match=f"no tensor '{Q}"):
            open_checkpoint(copy)
        value = stored[Q + suffix]
        short = torch.cat([value.reshape(-1), value.reshape(-1)[:1]])
        copy = altered(folders[name], tmp_path, lambda tensors, key=Q + suffix, new=short: tensors.update({key: new}))
        with pytest.raises(CorruptModel, match=f"'{Q}.*(damaged|the config says)"):
            open_checkpoint(copy).float32_array(f"{Q}.weight")


@pytest.mark.parametrize(
    ("name", "suffix", "value", "phrase"),
    [
        ("GPTQ 4, act-order", "g_idx", 2, "names the groups .* to 2; there are 0 to 1"),
        ("GPTQ 4, act-order", "g_idx", -1, "names the groups -1"),
        ("GPTQ 4, act-order", "scales", float("nan"), "not finite"),
        ("AWQ", "scales", float("inf"), "not finite"),
        ("W8A8", "weight_scale", float("nan"), "not finite"),
        ("W4A16, asymmetric", "weight_shape", 7, "weight_shape"),
        ("bitsandbytes int8", "SCB", float("nan"), "not finite"),
        ("NF4, nested", "weight.quant_state.bitsandbytes__nf4", 65, "is not JSON"),
        ("MXFP4", "weight_scale", 255, "not numbers"),
    ],
)
def test_impossible_values(
    folders: dict[str, Path], tmp_path: Path, name: str, suffix: str, value: float, phrase: str
) -> None:
    copy = altered(folders[name], tmp_path, lambda tensors: tensors[f"{Q}.{suffix}"].view(-1)[:1].fill_(value))
    with pytest.raises(CorruptModel, match=phrase):
        open_checkpoint(copy).float32_array(f"{Q}.weight")


def test_float8_that_is_no_number(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = altered(
        folders["fp8, blocks"], tmp_path, lambda tensors: tensors[f"{Q}.weight"].view(torch.uint8)[3:4, 5].fill_(0xFF)
    )
    with pytest.raises(CorruptModel, match="not numbers"):
        open_checkpoint(copy).float32_array(f"{Q}.weight")


def test_the_order_of_a_gpu_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = altered(folders["bitsandbytes int8"], tmp_path, lambda tensors: tensors[f"{Q}.weight_format"].fill_(1))
    with pytest.raises(UnsupportedModel, match="weight_format is not 0"):
        open_checkpoint(copy).float32_array(f"{Q}.weight")


@pytest.mark.parametrize("name", ["AWQ", "fp8, blocks", "W8A8", "NF4, nested"])
def test_quantized_modules_that_the_config_excludes(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    fields = {"compressed-tensors": "ignore", "bitsandbytes": "llm_int8_skip_modules"}
    field = fields.get(str(CASES[name].config["quant_method"]), "modules_to_not_convert")
    copy = altered(folders[name], tmp_path, lambda tensors: None, {field: [Q]})
    with pytest.raises(CorruptModel, match=f"{Q} is quantized, but quantization_config in config.json excludes it"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", USED)
def test_modules_that_are_stored_as_floats_stay_floats(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    plain = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith(f"{Q}.")]:
            del tensors[key]
        tensors[f"{Q}.weight"] = plain

    weights = open_checkpoint(altered(folders[name], tmp_path, change))
    assert not weights.is_quantized(f"{Q}.weight") and weights.stored_type(f"{Q}.weight") == "BF16"
    assert torch.equal(weights.tensor(f"{Q}.weight", torch.bfloat16, "cpu"), plain)


def test_other_types_are_not_read_as_floats(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = altered(
        folders["W8A8"],
        tmp_path,
        lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(128, 128).to(torch.int16)}),
    )
    with pytest.raises(ModelError, match="is I16"):
        open_checkpoint(copy)
