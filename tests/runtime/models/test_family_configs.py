"""Config fields of single families, compared with transformers' reading of config.json, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import CONFIG_LONGROPE, CONFIG_YARN, FAMILY_CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, Phi3Config, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.models.gguf_config import TensorDerivedFields
from plait.runtime.models.registry import FAMILIES, config_from_gguf, config_from_hf

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
}
HF_FIELDS = {case.model_class.__name__: case.config_json for case in FAMILY_CASES.values()}


def hf(name: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [name]} | BASE | HF_FIELDS[name] | changes


@pytest.mark.parametrize("name", HF_FIELDS)
def test_config_json_of_every_family_is_read(name: str) -> None:
    assert config_from_hf(hf(name)).num_layers == 8


def test_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"Gemma3ForCausalLM.*Phi3ForCausalLM.*Qwen3MoeForCausalLM"):
        config_from_hf(BASE | {"architectures": ["Gemma4ForCausalLM"]})


def transformers_config(kind: type[PreTrainedConfig], name: str, tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(hf(name, model_type=kind.model_type)))
    return kind.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Qwen2Config, "Qwen2ForCausalLM"), (Qwen3Config, "Qwen3ForCausalLM"), (Gemma3TextConfig, "Gemma3ForCausalLM")],
)
def test_default_layer_types_equal_transformers(kind: type[PreTrainedConfig], name: str, tmp_path: Path) -> None:
    expected = transformers_config(kind, name, tmp_path)
    ours = config_from_hf(hf(name))
    windows = [expected.sliding_window if t == "sliding_attention" else None for t in expected.layer_types]
    assert [ours.window(i) for i in range(8)] == windows
    assert (64 in windows) == (name != "Qwen3ForCausalLM")


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("more", [{}, {"beta_fast": 20.0, "beta_slow": 2.0}, {"attention_factor": 1.5}])
def test_yarn_frequencies_equal_transformers(theta: float, head_dim: int, more: dict[str, float]) -> None:
    rope = CONFIG_YARN | {"rope_theta": theta} | more
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](
        Qwen3Config(**BASE | {"head_dim": head_dim, "rope_parameters": rope}), "cpu"
    )
    ours = config_from_hf(hf("Qwen3ForCausalLM", head_dim=head_dim, rope_scaling=rope))
    np.testing.assert_allclose(ours.inverse_frequencies(), expected.numpy(), rtol=1e-5)
    assert ours.rope_scaling is not None
    assert ours.rope_scaling.attention_factor == pytest.approx(attention_factor)
    assert attention_factor != 1


def test_longrope_attention_factor_and_legacy_names(tmp_path: Path) -> None:
    _, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](
        transformers_config(Phi3Config, "Phi3ForCausalLM", tmp_path), "cpu"
    )
    for kind in ("longrope", "su", "yarn"):  # early Phi-3 files say su or yarn
        scaling = config_from_hf(hf("Phi3ForCausalLM", rope_scaling=CONFIG_LONGROPE | {"type": kind})).rope_scaling
        assert scaling is not None
        assert (scaling.kind, scaling.original_context_length) == ("longrope", 1024)
        assert scaling.attention_factor == pytest.approx(attention_factor)


def test_gemma_config_of_transformers_4(tmp_path: Path) -> None:
    expected = transformers_config(Gemma3TextConfig, "Gemma3ForCausalLM", tmp_path)
    ours = config_from_hf(hf("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert ours.rope_theta == expected.rope_parameters["full_attention"]["rope_theta"] == 5e5
    assert ours.sliding_rope_theta == expected.rope_parameters["sliding_attention"]["rope_theta"] == 5e3
    assert ours.inverse_frequencies()[0] == pytest.approx(1 / 8)
    assert ours.sliding_inverse_frequencies()[0] == 1.0
    assert (ours.softmax_scale, ours.tie_word_embeddings) == (256**-0.5, True)


def test_layers_with_experts(tmp_path: Path) -> None:
    experts = config_from_hf(hf("Qwen3MoeForCausalLM")).experts
    assert experts is not None
    assert experts.layers == (False, True, False, False, False, True, False, True)
    expected = transformers_config(Qwen3MoeConfig, "Qwen3MoeForCausalLM", tmp_path)
    assert (experts.experts_per_token, experts.normalize_topk) == (
        expected.num_experts_per_tok,
        expected.norm_topk_prob,
    )


def test_mtp_layers_of_mimo() -> None:
    counts = [{}, {"num_nextn_predict_layers": None}, {"num_nextn_predict_layers": 2}]
    bare = {key: value for key, value in hf("MiMoForCausalLM").items() if key != "num_nextn_predict_layers"}
    assert [config_from_hf(bare | count).num_mtp_layers for count in counts] == [0, 0, 2]


GGUF_KEYS = {
    "vocab_size": 100,
    "embedding_length": 512,
    "block_count": 8,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 96,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 256,
    "attention.sliding_window": 64,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}


def gguf(name: str, **changes: Any) -> dict[str, Any]:
    keys = GGUF_KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    if name == "llama":
        keys = {key: value for key, value in keys.items() if not key.startswith("expert")}
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in keys.items()}


def test_gguf_gemma_27b_attention_scale() -> None:
    """The file has no field for it; llama.cpp recognizes the 27B model by its 62 layers."""
    assert config_from_gguf(gguf("gemma3", block_count=62, attention__key_length=64)).softmax_scale == pytest.approx(
        128**-0.5
    )
    assert config_from_gguf(gguf("gemma3", attention__key_length=64)).softmax_scale == pytest.approx(1 / 8)
    assert config_from_gguf(gguf("gemma3", attention__scale=0.25)).softmax_scale == 0.25


@pytest.mark.parametrize(
    ("name", "change", "error", "phrase"),
    [
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, UnsupportedModel, "final_logit_softcapping"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, UnsupportedModel, "bidirectional"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, UnsupportedModel, "gelu_pytorch_tanh"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 8}, UnsupportedModel, "chunked"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 7}, CorruptModel, "7 attention types"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, CorruptModel, "sliding_window"),
        ("Qwen2ForCausalLM", {"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        ("MiMoForCausalLM", {"num_nextn_predict_layers": -1}, CorruptModel, "num_nextn_predict_layers"),
        ("Qwen2ForCausalLM", {"max_window_layers": "3"}, CorruptModel, "max_window_layers"),
        ("Qwen3ForCausalLM", {"rope_scaling": CONFIG_YARN | {"mscale": 1.0}}, UnsupportedModel, "mscale"),
        ("Qwen3ForCausalLM", {"rope_scaling": CONFIG_YARN | {"truncate": False}}, UnsupportedModel, "truncate"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [True]}, CorruptModel, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 9}, CorruptModel, "experts per token"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 9}, CorruptModel, "expert layers"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": CONFIG_LONGROPE | {"short_factor": [1.0]}},
            CorruptModel,
            "1 rope divisors",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": CONFIG_LONGROPE | {"long_mscale": 1.2}}, UnsupportedModel, "long_mscale"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 2}, CorruptModel, "partial_rotary_factor"),
    ],
)
def test_config_json_is_rejected(name: str, change: dict[str, Any], error: type[ModelError], phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        config_from_hf(hf(name, **change))


@pytest.mark.parametrize(
    ("name", "change", "error", "phrase"),
    [
        ("gemma3", {"attention__sliding_window": 0}, CorruptModel, "sliding_window"),
        ("gemma3", {"final_logit_softcapping": 30.0}, UnsupportedModel, "softcapping"),
        ("gemma3", {"attention__sliding_window_pattern": np.array([1, 0])}, CorruptModel, "2 attention types"),
        ("qwen2", {"rope__dimension_count": 64}, UnsupportedModel, "dimension_count"),
        (
            "qwen3",
            {"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 1.0},
            UnsupportedModel,
            "ext_factor",
        ),
        ("qwen3moe", {"expert_used_count": 9}, CorruptModel, "experts per token"),
        ("phi3", {"rope__dimension_count": 256}, CorruptModel, "256 rotary"),
        ("phi3", {"rope__scaling__type": "longrope"}, UnsupportedModel, "longrope"),
    ],
)
def test_gguf_metadata_is_rejected(name: str, change: dict[str, Any], error: type[ModelError], phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        config_from_gguf(gguf(name, **change))
    if "longrope" in phrase:
        with pytest.raises(CorruptModel, match="not both"):
            config_from_gguf(gguf(name), TensorDerivedFields(rope_short=(1.0,) * 64))


junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.none()))


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_random_values_raise_model_errors_or_give_finite_configs(data: st.DataObject) -> None:
    names = st.sampled_from(
        [(hf(name), config_from_hf) for name in HF_FIELDS]
        + [(gguf(f.gguf_architecture), config_from_gguf) for f in FAMILIES if f.gguf_architecture]
    )
    source, read = data.draw(names)
    own = (
        ["layer_types", "rope_parameters", "partial_rotary_factor", "query_pre_attn_scalar"]
        if read is config_from_hf
        else []
    )
    values = junk if read is config_from_hf else junk | st.just(np.arange(2))
    changed = source | data.draw(st.dictionaries(st.sampled_from(sorted(source) + own), values, max_size=3))
    if isinstance(changed.get("rope_scaling"), dict):
        rope = changed["rope_scaling"]
        changed["rope_scaling"] = rope | data.draw(st.dictionaries(st.sampled_from(sorted(rope)), junk, max_size=2))
    try:
        config = read(changed)
    except ModelError:
        return
    assert np.isfinite(config.inverse_frequencies()).all()
    assert all(config.window(i) is None or config.window(i) > 0 for i in range(min(config.num_layers, 50)))
    assert config.softmax_scale > 0
