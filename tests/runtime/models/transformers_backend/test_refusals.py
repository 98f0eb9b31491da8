"""Models and settings that the transformers backend refuses, with the reason, and how a backend is chosen."""

from __future__ import annotations

import builtins
import json

import pytest
import torch
from other_architectures import build_other
from safetensors.torch import load_file, save_file
from tiny_hf_models import randomized, runner
from transformers import LlamaConfig, LlamaForCausalLM

from plait.cli import main
from plait.runtime.config import engine_config
from plait.runtime.errors import CorruptModel, InputError, ModelNotFound, UnsupportedModel
from plait.runtime.executor.backend_selection import uses_transformers
from plait.runtime.executor.transformers_runner import TransformersRunner
from plait.runtime.models.transformers_backend import model as transformers_model

CONFIG = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "vocab_size": 97, "hidden_size": 32}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "conv"],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.fixture(scope="module")
def cohere(tmp_path_factory):
    """A tiny folder of an architecture without a family."""
    folder = tmp_path_factory.mktemp("cohere")
    randomized(build_other("cohere")).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # `plait check` looks for it
    return folder


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "encoder-decoder"),
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "linear_attention|recurrent state|no attention interface",
        ),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "linear_attention"),
        (LFM2, "layers of the type conv"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "no attention interface"),
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"architectures": ["OlmoForSequenceClassification"], "model_type": "olmo"}, "not a causal language model"),
        (CONFIG | {"rope_parameters": DYNAMIC}, "depends on the length"),
        (CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        (
            {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "x.Y"}},
            "cannot read its config",
        ),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_models_that_cannot_run_are_refused_by_name(config, reason, tmp_path):
    write(tmp_path, config)
    (tmp_path / "x.py").write_text("raise SystemExit('code of the folder ran')")
    with pytest.raises(UnsupportedModel, match=f"{config['architectures'][0]}.*({reason})"):
        runner(tmp_path)


def test_a_folder_without_safetensors_is_refused(cohere, tmp_path):
    (tmp_path / "config.json").write_text((cohere / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(ModelNotFound, match="no safetensors"):
        runner(tmp_path)


def test_a_missing_tensor_is_not_replaced_by_random_values(cohere, tmp_path):
    (tmp_path / "config.json").write_text((cohere / "config.json").read_text())
    tensors = load_file(cohere / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptModel, match=r"no tensor 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        runner(tmp_path)


@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"kv_dtype": "fp8"}, {"deterministic": True}], ids=str)
def test_settings_without_effect_are_refused(cohere, settings):
    with pytest.raises(InputError, match=f"backend='transformers' has no {next(iter(settings))}"):
        runner(cohere, **settings)


def test_a_model_whose_logits_differ_with_the_paged_attention_is_refused(cohere, monkeypatch):
    """As a layer with a state outside the KV cache would."""
    attend = transformers_model.PagedAttention.attend

    def without_cached_keys(self, module, q, k, v, *others):
        if self.layout is not None:
            self.caches[0].k.zero_()
        return attend(self, module, q, k, v, *others)

    monkeypatch.setattr(transformers_model.PagedAttention, "attend", without_cached_keys)
    with pytest.raises(UnsupportedModel, match="gives other logits with the paged attention"):
        runner(cohere)


def test_the_backend_is_chosen_by_the_architecture(cohere, tmp_path):
    LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=8, num_hidden_layers=1)
    ).save_pretrained(tmp_path)
    for folder, backend, expected in [
        (cohere, "auto", True),
        (cohere, "plait", False),
        (tmp_path, "auto", False),
        (tmp_path, "transformers", True),
    ]:
        assert uses_transformers(engine_config(backend=backend), folder) is expected
    with pytest.raises(UnsupportedModel, match=r"'CohereForCausalLM' is not supported; plait runs"):
        runner(cohere, backend="plait")
    assert isinstance(runner(tmp_path, backend="transformers"), TransformersRunner)


def test_check_names_the_backend_and_the_reason(cohere, capsys):
    assert main(["check", "--model", str(cohere)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["backend"].endswith("(plait has no family for this architecture)")
    assert lines["architecture"] == "CohereForCausalLM"
    assert main(["check", "--model", str(cohere), "--backend", "plait"]) == 1
    assert "'CohereForCausalLM' is not supported" in capsys.readouterr().err


def test_without_transformers_the_error_names_the_extra(cohere, monkeypatch):
    def missing(name, *arguments):
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return builtins.__import__(name, *arguments)

    monkeypatch.setattr("plait.runtime.models.transformers_backend.config.importlib.import_module", missing)
    with pytest.raises(InputError, match=r"CohereForCausalLM needs the package transformers.*plait\[transformers\]"):
        runner(cohere)
