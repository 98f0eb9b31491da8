"""The fields of quantization_config: what is read, and that everything else is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantized_checkpoints import CASES, compressed, gptq_config

from plait.runtime.errors import CorruptModel, ModelError, UnsupportedModel
from plait.runtime.weights.quantized.module_names import ExactNames, PartialNames, compile_pattern
from plait.runtime.weights.quantized.registry import READERS, read_quantization

GPTQ, AWQ, FP8, NF4, INT8 = (
    CASES[name].config for name in ("GPTQ 8, one group", "AWQ", "fp8, blocks", "NF4, nested", "bitsandbytes int8")
)
INT4 = compressed("pack-quantized", num_bits=4, strategy="group", group_size=128)


def read(config: Any) -> Any:
    return read_quantization({"quantization_config": config})


def test_every_format_has_a_case_and_a_description() -> None:
    assert {case.config["quant_method"] for case in CASES.values()} == set(READERS)
    found = {name: read(case.config).description for name, case in CASES.items()}
    assert found["GPTQ 4, act-order"] == "GPTQ, 4 bits in groups of 64"
    assert found["GPTQ 8, one group"] == "GPTQ, 8 bits with a scale per output"
    in_fp8 = "activations in fp8 for many tokens on GPUs with fp8, else in 16 bits"
    assert found["fp8, blocks"] == f"fp8, a scale per block of 128 x 128; {in_fp8}"
    assert found["W8A8 fp8, channel"] == f"compressed-tensors, fp8 with a scale per channel; {in_fp8}"
    assert (
        found["W8A8 fp8, blocks"] == "compressed-tensors, fp8 with a scale for each block of 128 x 128"
    )  # weights only
    assert found["W4A16"] == "compressed-tensors, int4 in groups of 64"
    assert found["W8A8"] == "compressed-tensors, int8 with a scale per output; activations stay in 16 bits"
    assert found["NF4, nested"] == "bitsandbytes, nf4"
    assert read_quantization({}) is None and read_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        ({"quant_method": "aqlm"}, "'aqlm'; plait reads gptq, awq, fp8"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"bits": 4}, "None; plait reads gptq"),
        (GPTQ | {"bits": 3}, "bits is 3; plait reads 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; plait reads gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is not supported"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic gives"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype"),
        (GPTQ | {"new_field": 1}, "quantization_config.new_field is unknown"),
        (AWQ | {"bits": 8}, "bits is 8; plait reads 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; plait reads AWQ in the version gemm"),
        (AWQ | {"backend": "llm-awq"}, "llm-awq"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'; plait reads e4m3"),
        (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        (FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert is not supported"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        (INT4 | {"format": "marlin-24"}, "format is 'marlin-24'; plait reads pack-quantized"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "nvfp4"),
        (INT4 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is 'sparse-24-bitmask'"),
        (INT4 | {"transform_config": {"config_groups": {}}}, "transform_config is not supported"),
        (compressed("int-quantized", num_bits=4), "4-bit int weights per channel in the format int-quantized"),
        (compressed("pack-quantized", dynamic=True), "dynamic is True"),
        (compressed("pack-quantized", {"num_bits": 4}), "input_activations.num_bits is 4; plait reads 8"),
        (compressed("float-quantized", type="float", symmetric=False), "with zero points"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], phrase: str) -> None:
    with pytest.raises(UnsupportedModel, match=phrase):
        read(config)


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        ("gptq", "not an object"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"group_size": "128"}, "group_size is '128', not a whole number"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is not a list"),
        (NF4 | {"load_in_8bit": True}, "one of load_in_4bit and load_in_8bit"),
        (INT4 | {"config_groups": {}}, "config_groups"),
    ],
)
def test_values_of_wrong_types_are_rejected(config: Any, phrase: str) -> None:
    with pytest.raises(CorruptModel, match=phrase):
        read(config)


def test_modules_that_are_not_converted() -> None:
    layer = "model.layers.0.mlp"
    partial = read(FP8 | {"modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.1"], "ignored_layers": None})
    names = (f"{layer}.gate", f"{layer}.gate_proj", "model.layers.10.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert [partial.format_of(name) is None for name in ("lm_head", *names)] == [True, True, False, False, True]
    exact = read(INT4 | {"ignore": ["lm_head", r"re:.*mlp\.(gate|up)_proj$", "model.layers.1"]})
    assert [exact.format_of(name) is None for name in ("lm_head", *names)] == [True, False, True, True, True]
    left = read(gptq_config(4, 128, dynamic={r"-:.*\.up_proj": {}}))
    assert [left.format_of(name) is None for name in names] == [False, False, True, True]


def test_groups_of_modules_and_their_order() -> None:
    first, second = (compressed("pack-quantized", num_bits=bits)["config_groups"]["group_0"] for bits in (4, 8))
    config = INT4 | {"config_groups": {"a": first, "b": second | {"targets": ["re:.*down_proj", "model.x"]}}}
    found = read(config)
    assert [found.format_of(name).bits for name in ("model.layers.0.mlp.down_proj", "model.x", "y")] == [8, 8, 4]
    assert found.description == "compressed-tensors, int4 with a scale per output and int8 with a scale per output"
    only = read(INT4 | {"config_groups": {"b": second | {"targets": ["model.x"]}}})
    assert only.format_of("model.y") is None
    with pytest.raises(UnsupportedModel, match=r"config_groups\.b\.targets is Embedding"):
        read(INT4 | {"config_groups": {"b": second | {"targets": ["Embedding"]}}})


def test_patterns_that_could_take_long_are_refused() -> None:
    for pattern in ("(a+)+$", "(a|aa)*b", ".*.*.*.*b", "a" * 201, "(", "a{2000000000}{3}"):
        with pytest.raises(UnsupportedModel, match="pattern"):
            compile_pattern(pattern)
    assert ExactNames([r"re:.*self_attn\.[qkv]_proj"]).match("model.layers.3.self_attn.k_proj")
    assert not PartialNames(["mlp"]).match("model.mlps")


@given(st.sampled_from(list(CASES)), st.data())
def test_altered_configs_are_read_or_refused(name: str, data: st.DataObject) -> None:
    config = dict(CASES[name].config)
    junk = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.text(max_size=4), max_size=3)
    key = data.draw(st.sampled_from(sorted(config)) | st.text(max_size=5))
    config[key] = data.draw(junk | st.dictionaries(st.text(max_size=4), junk, max_size=2))
    try:
        read(config)
    except ModelError as error:
        assert str(error)  # noqa: PT017 (some values are as good as those before)
