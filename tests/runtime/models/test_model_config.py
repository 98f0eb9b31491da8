"""Model configs compared with transformers, and values that are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.gguf_config import TensorDerivedFields
from plait.runtime.models.registry import config_from_gguf, config_from_hf
from plait.runtime.models.rope import RopeScaling

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 100,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 256,
}


def test_config_of_the_embedded_model() -> None:
    config = config_from_gguf(open_gguf(locate_model(), metadata_only=True).metadata)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (49152, 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.intermediate_size, config.context_length, config.rope_theta) == (1536, 8192, 100_000.0)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings


def test_hf_and_gguf_configs_agree() -> None:
    assert config_from_gguf(GGUF, TensorDerivedFields(tie_word_embeddings=False)) == config_from_hf(HF)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotary_frequencies_equal_transformers(tmp_path: Path, rope: dict[str, Any], theta: float) -> None:
    hf_config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": theta, **rope},
    )
    hf_config.save_pretrained(tmp_path)
    ours = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert (ours.rope_theta, ours.head_dim, ours.num_kv_heads) == (theta, 64, 2)
    if rope["rope_type"] == "default":
        expected = theta ** (-np.arange(0, 64, 2) / 64)
    else:
        expected = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, "cpu")[0].numpy()
    np.testing.assert_allclose(ours.inverse_frequencies(), expected, rtol=1e-5)


def test_rope_scaling_of_transformers_4() -> None:
    old = config_from_hf(HF | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling("linear", factor=2.0))


def test_gguf_rope_divisors_equal_llama3_scaling() -> None:
    scaled = config_from_hf(HF | {"rope_scaling": LLAMA3})
    plain = config_from_hf(HF)
    divisors = [p / s for p, s in zip(plain.inverse_frequencies(), scaled.inverse_frequencies(), strict=True)]
    config = config_from_gguf(GGUF, TensorDerivedFields(rope_divisors=tuple(divisors)))
    np.testing.assert_allclose(config.inverse_frequencies(), scaled.inverse_frequencies(), rtol=1e-12)
    assert max(divisors) == 8
    with pytest.raises(CorruptModel, match="3 rope divisors"):
        config_from_gguf(GGUF, TensorDerivedFields(rope_divisors=tuple(divisors[:3])))
    with pytest.raises(CorruptModel, match="divisor"):
        config_from_gguf(GGUF, TensorDerivedFields(rope_divisors=(0.0,) * 8))


def test_mistral_sliding_window(tmp_path: Path) -> None:
    MistralConfig(architectures=["MistralForCausalLM"], sliding_window=None).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert config_from_hf(saved).sliding_window is None
    assert config_from_hf(saved | {"sliding_window": 128}).sliding_window == 128
    assert config_from_hf(saved).num_kv_heads == 8


def test_gguf_linear_scaling_and_uniform_layers() -> None:
    linear = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(linear).rope_scaling == RopeScaling("linear", factor=4.0)
    uniform_int = GGUF | {"llama.attention.head_count_kv": np.array([2, 2], np.int32)}
    assert config_from_gguf(uniform_int) == config_from_gguf(GGUF)


def test_soft_caps_of_gemma2_have_the_defaults_of_both_containers() -> None:
    in_folder = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3, "num_attention_heads": 4}
    in_folder |= {"hidden_size": 64, "vocab_size": 97, "intermediate_size": 96, "max_position_embeddings": 128}
    in_file = {key.replace("llama.", "gemma2."): value for key, value in GGUF.items()}
    for config in (config_from_hf(in_folder), config_from_gguf(in_file | {"general.architecture": "gemma2"})):
        assert (config.attention_softcap, config.logit_softcap, config.sliding_window) == (50.0, 30.0, 4096)
        assert config.sliding_layers[:2] == (True, False)
    for caps, expected in ((None, 0.0), (7.0, 7.0)):
        named = {"attn_logit_softcapping": caps, "final_logit_softcapping": caps}
        config = config_from_hf(in_folder | named)
        assert (config.attention_softcap, config.logit_softcap) == (expected, expected)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        with pytest.raises(CorruptModel, match="softcap"):
            config_from_hf(in_folder | {name: -1.0})


def test_olmo3_is_refused_in_files_of_olmo2() -> None:
    olmo = {key.replace("llama.", "olmo2."): value for key, value in GGUF.items()} | {"general.architecture": "olmo2"}
    assert config_from_gguf(olmo).architecture == "olmo2"
    with pytest.raises(UnsupportedModel, match="OLMo 3"):
        config_from_gguf(olmo | {"olmo2.attention.sliding_window": 64})


def test_experts_are_refused_in_a_family_without_them() -> None:
    granite = {key.replace("llama.", "granite."): value for key, value in GGUF.items()}
    with pytest.raises(UnsupportedModel, match="granite as a mixture of experts"):
        config_from_gguf(granite | {"general.architecture": "granite", "granite.expert_count": 8})


@pytest.mark.parametrize(
    ("change", "error", "phrase"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModel, "GPT2LMHeadModel.*MistralForCausalLM"),
        ({"architectures": None}, UnsupportedModel, "None"),
        ({"num_key_value_heads": 3}, CorruptModel, "4 heads"),
        ({"num_attention_heads": 0}, CorruptModel, "num_attention_heads"),
        ({"num_hidden_layers": -1}, CorruptModel, "num_layers"),
        ({"hidden_size": 2**40}, CorruptModel, "hidden_size"),
        ({"hidden_size": True}, CorruptModel, "hidden_size"),
        ({"vocab_size": "100"}, CorruptModel, "vocab_size"),
        ({"head_dim": 15}, CorruptModel, "odd"),
        ({"rms_norm_eps": float("nan")}, CorruptModel, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, CorruptModel, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, CorruptModel, "rope_theta"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModel, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, CorruptModel, "factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, CorruptModel, "high"),
        ({"rope_scaling": ["linear"]}, CorruptModel, "object"),
        ({"attention_bias": "no"}, CorruptModel, "attention_bias"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
    ],
)
def test_invalid_config_json_is_rejected(change: dict[str, Any], error: type[ModelError], phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        config_from_hf(HF | change)


@pytest.mark.parametrize(
    ("change", "error", "phrase"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModel, "mamba.*llama"),
        ({"general.architecture": ["llama"]}, UnsupportedModel, "llama"),
        ({"llama.attention.head_count": 0}, CorruptModel, "head_count"),
        ({"llama.attention.head_count_kv": np.array([1, 2], np.int32)}, UnsupportedModel, "between layers"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, CorruptModel, "rms_norm_eps"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModel, "dimension_count"),
        ({"llama.rope.scaling.type": "ntk"}, UnsupportedModel, "ntk"),
        ({"llama.expert_count": 8}, CorruptModel, "expert_used_count"),
        ({"split.count": 3}, UnsupportedModel, "3 GGUF files"),
        ({"llama.block_count": 10**9}, CorruptModel, "block_count"),
    ],
)
def test_invalid_gguf_metadata_is_rejected(change: dict[str, Any], error: type[ModelError], phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        config_from_gguf(GGUF | change)


junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.none()))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_values_raise_model_errors_or_give_finite_configs(data: st.DataObject) -> None:
    source, read = data.draw(
        st.sampled_from([(HF | {"rope_scaling": LLAMA3}, config_from_hf), (GGUF, config_from_gguf)])
    )
    values = junk if read is config_from_hf else junk | st.just(np.arange(2))  # JSON has no arrays of numbers
    changed = source | data.draw(st.dictionaries(st.sampled_from(sorted(source)), values, max_size=3))
    if "rope_scaling" in changed and data.draw(st.booleans()):
        changed["rope_scaling"] = LLAMA3 | data.draw(st.dictionaries(st.sampled_from(sorted(LLAMA3)), junk))
    try:
        config = read(changed)
    except ModelError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert all(np.isfinite(config.inverse_frequencies()))
