"""Adapters that cannot be used are refused with the field or tensor that is wrong."""

from __future__ import annotations

import gc
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_adapters import make_adapter, write_gguf_adapter
from tiny_hf_models import randomized, runner, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from plait.runtime.adapters.adapter import LowRankUpdate
from plait.runtime.adapters.load import open_adapter
from plait.runtime.errors import CorruptModel, InputError, ModelNotFound
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint

Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"
SIZES = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    model = randomized(LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=96, **SIZES)))
    model.save_pretrained(folder / "base")
    write_gguf(model, folder / "model.gguf")
    make_adapter(model, folder / "peft", 1, target_modules=["q_proj", "v_proj"])
    write_gguf_adapter(model, folder / "peft", folder / "adapter.gguf")
    write_gguf_adapter(model, folder / "peft", folder / "activated.gguf", **{"adapter.alora.invocation_tokens": "x"})
    return folder


@pytest.fixture(scope="module")
def config(saved):
    return open_checkpoint(saved / "base").config


def load_adapters(paths, config):
    shapes = expected_shapes(config)
    return [open_adapter(name, path, config, shapes).read() for name, path in paths.items()]


def changed(saved, folder, fields=None, tensors=None):
    """A copy of the adapter with other fields and tensors; None removes one."""
    described = json.loads((saved / "peft" / "adapter_config.json").read_text()) | (fields or {})
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(described))
    arrays = load_file(saved / "peft" / "adapter_model.safetensors") | (tensors or {})
    save_file(
        {name: array for name, array in arrays.items() if array is not None}, folder / "adapter_model.safetensors"
    )
    return str(folder)


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("fields", "tensors", "error", "phrase"),
    [
        ({"peft_type": "IA3"}, {}, InputError, "of the type 'IA3'"),
        ({"use_dora": True}, {}, InputError, "use_dora=True"),
        ({}, {f"{Q}.lora_magnitude_vector": zeros(64)}, InputError, "lora_magnitude_vector"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, InputError, "pissa_niter_4"),
        ({"a_field_of_tomorrow": 3}, {}, InputError, "a_field_of_tomorrow=3"),
        ({"fan_in_fan_out": True}, {}, InputError, "fan_in_fan_out"),
        ({"r": None}, {}, CorruptModel, "'r'"),
        ({"r": 5}, {}, CorruptModel, "rank 4 at model.layers.0.self_attn.q_proj, its adapter_config.json says 5"),
        ({"rank_pattern": {"(": 1}}, {}, CorruptModel, "no regular expression"),
        ({"rank_pattern": {"([a-z_.0-9]+)+X": 4}}, {}, InputError, "may take too long"),
        ({"rank_pattern": {"(.|.)" * 20: 4}}, {}, InputError, "may take too long"),
        ({"rank_pattern": {".*" * 9 + "X": 4}}, {}, InputError, "may take too long"),
        ({"alpha_pattern": {"q_proj": "16"}}, {}, CorruptModel, "'16' at 'q_proj' in alpha_pattern"),
        ({"alpha_pattern": ["q_proj"]}, {}, CorruptModel, "alpha_pattern=['q_proj']"),
        ({"lora_alpha": float("inf")}, {}, CorruptModel, "'lora_alpha'"),
        ({"use_rslora": "false"}, {}, CorruptModel, "use_rslora='false'"),
        ({"init_lora_weights": "OLoRA"}, {}, InputError, "OLoRA"),
        ({}, {f"{Q}.lora_A.default.weight": zeros(4, 64)}, CorruptModel, "layers.0.self_attn.q_proj twice"),
        ({}, {"base_model.model.lm_head.weight": zeros(97, 64)}, InputError, "lm_head.weight"),
        ({"modules_to_save": ["lm_head"]}, {}, InputError, "modules_to_save=['lm_head']"),
        ({}, {f"{Q}.bias": zeros(64)}, InputError, "q_proj.bias"),
        (
            {},
            {f"{EMBEDDING}.lora_embedding_A": zeros(4, 97), f"{EMBEDDING}.lora_embedding_B": zeros(64, 4),
             f"{EMBEDDING}.lora_B.bias": zeros(64)},
            InputError,
            "a bias at model.embed_tokens",
        ),
        ({}, {f"{Q}.lora_B.weight": None}, CorruptModel, "no lora_B.weight of model.layers.0.self_attn.q_proj"),
        ({}, {f"{Q}.lora_B.weight": zeros(32, 4)}, InputError, "another model: its model.layers.0.self_attn.q_proj"),
        ({}, {f"{Q}.lora_B.weight": np.full((64, 4), np.nan, np.float32)}, InputError, "not finite"),
        ({}, {Q.replace(".0.", ".2.") + ".lora_A.weight": zeros(4, 64)}, InputError, "model.layers.2.self_attn.q_proj"),
        ({}, {Q.replace("q_proj", "rotary") + ".lora_A.weight": zeros(4, 64)}, InputError, "self_attn.rotary"),
        ({}, {f"{Q}.lora_A.weight": np.zeros((4, 64), np.int32)}, InputError, "stored as I32"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(saved, config, tmp_path, fields, tensors, error, phrase):
    with pytest.raises(error) as raised:
        load_adapters({"mine": changed(saved, tmp_path / "a", fields, tensors)}, config)
    assert phrase in str(raised.value)


def test_one_that_differs_from_one_that_was_opened_before_is_checked_again(saved, config, tmp_path):
    """Its fields, its header, its size, or the model."""
    load_adapters({"mine": str(saved / "peft")}, config)
    with pytest.raises(CorruptModel, match="rank 4 at"):
        load_adapters({"mine": changed(saved, tmp_path / "fields", {"r": 5})}, config)
    with pytest.raises(InputError, match="use_dora=True"):
        load_adapters({"mine": changed(saved, tmp_path / "kind", {"use_dora": True})}, config)
    with pytest.raises(InputError, match="another model"):
        load_adapters({"mine": str(saved / "peft")}, replace(config, num_kv_heads=1))
    path = changed(saved, tmp_path / "short")
    load_adapters({"mine": path}, config)
    os.truncate(f"{path}/adapter_model.safetensors", os.stat(f"{path}/adapter_model.safetensors").st_size - 4)
    with pytest.raises(CorruptModel, match="damaged"):
        open_adapter("mine", path, config, expected_shapes(config))  # before the numbers are read


def test_an_adapter_that_changes_nothing_is_refused(saved, config, tmp_path):
    tensors = load_file(saved / "peft" / "adapter_model.safetensors")
    nothing = {name: np.zeros_like(array) for name, array in tensors.items() if "lora_B" in name}
    for index, (fields, tensors) in enumerate((
        ({}, nothing),
        ({}, nothing | {f"{Q}.lora_B.bias": zeros(64)}),
        ({"lora_alpha": 0}, {}),
    )):  # fmt: skip
        with pytest.raises(InputError, match="would change nothing"):
            load_adapters({"mine": changed(saved, tmp_path / str(index), fields, tensors)}, config)


def test_missing_and_damaged_files(saved, config, tmp_path):
    with pytest.raises(InputError, match="there is no"):
        load_adapters({"mine": str(tmp_path / "none")}, config)
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json"):
        load_adapters({"mine": str(tmp_path)}, config)
    folder = tmp_path / "a"
    weights = folder / "adapter_model.safetensors"
    path = changed(saved, folder)
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CorruptModel):
        load_adapters({"mine": path}, config)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ModelNotFound, match=r"does not read adapter_model\.bin"):
        load_adapters({"mine": path}, config)


def test_a_file_that_becomes_shorter_while_it_is_open_is_an_error(saved, config, tmp_path):
    weights = Path(changed(saved, tmp_path / "a"), "adapter_model.safetensors")
    opened = open_adapter("mine", weights.parent, config, expected_shapes(config))
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CorruptModel, match="truncated"):
        opened.read()


def test_gguf_files_of_other_kinds(saved, config):
    assert load_adapters({"mine": str(saved / "adapter.gguf")}, config)
    with pytest.raises(InputError, match="activated LoRA"):
        load_adapters({"mine": str(saved / "activated.gguf")}, config)
    with pytest.raises(InputError, match="is no adapter"):
        load_adapters({"mine": str(saved / "model.gguf")}, config)


def test_shapes_are_checked_before_numbers_are_read(saved, config, tmp_path, monkeypatch):
    """Of a peft folder, and of a GGUF file whose rows are no whole heads."""
    monkeypatch.setattr("plait.runtime.adapters.peft_folder.widen", None)
    other = {f"{Q}.lora_A.weight": zeros(4, 999)}
    with pytest.raises(InputError, match=r"another model: its model\.layers\.0\.self_attn\.q_proj has 999 inputs"):
        load_adapters({"mine": changed(saved, tmp_path / "a", tensors=other)}, config)
    huge = {f"{Q}.lora_A.weight": zeros(2000, 64), f"{Q}.lora_B.weight": zeros(64, 2000)}
    with pytest.raises(InputError, match="at most 1024"):
        load_adapters(
            {"mine": changed(saved, tmp_path / "b", {"rank_pattern": {"0.self_attn.q_proj": 2000}}, huge)}, config
        )
    odd = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(odd, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    for part, shape in (("lora_a", (4, 64)), ("lora_b", (30, 4))):
        writer.add_tensor(f"blk.0.attn_q.weight.{part}", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"self_attn\.q_proj has 64 inputs and 30 outputs"):
        load_adapters({"mine": str(odd)}, config)


def test_patterns_for_every_module_of_a_deep_model_are_read_fast(saved, config, tmp_path):
    """Each is compiled once: 600 exceed the cache of the module re."""
    patterns = {rf"layers\.{layer}\.self_attn\.x_proj": 4 for layer in range(600)} | {"q_proj": 4}
    compiled = []
    original = re.compile

    def counting(pattern, *flags):
        compiled.append(pattern)
        return original(pattern, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(re, "compile", counting)
        load_adapters({"mine": changed(saved, tmp_path / "a", {"rank_pattern": patterns})}, config)
    assert sum("x_proj" in str(pattern) for pattern in compiled) == 600


def test_numbers_of_an_adapter_are_not_kept_once_they_are_packed(saved):
    ours = runner(saved / "base", adapters={"mine": str(saved / "peft"), "again": str(saved / "adapter.gguf")})
    assert list(ours.adapter_pool.names) == ["mine", "again"]
    gc.collect()
    assert not [kept for kept in gc.get_objects() if isinstance(kept, LowRankUpdate)]


def test_several_ranks_have_no_adapters(saved):
    with pytest.raises(InputError, match="in one process"):
        runner(saved / "base", tensor_parallel_size=2, adapters={"mine": str(saved / "peft")})
