"""Tiny models of every family, shared by the tests of families, of configs and of the packed CPU decoder.

A new family adds one entry to FAMILY_CASES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=128)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
GQA = SHAPE | HEADS
WINDOW = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
}
TWO_ROPE_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
NO_CAPS = dict(attn_logit_softcapping=None, final_logit_softcapping=None)
# Caps that change most scores and logits; of transformers' kinds of attention only the plain one has the cap of scores.
GEMMA2 = dict(
    head_dim=32, query_pre_attn_scalar=20, sliding_window=7, pad_token_id=0, attn_implementation="eager"
) | dict(attn_logit_softcapping=2.0, final_logit_softcapping=1.5)
GRANITE_FACTORS = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.3, logits_scaling=8.0
)
CONFIG_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e6}
CONFIG_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen 2 under MiMo's name, with which its published code inherits the forward pass."""

    config_class = MiMoConfig


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """The tiny models of one family.

    - `model_class`: the model in transformers.
    - `settings`: arguments of its config. With them alone every test of the family runs, from both containers.
    - `config_json`: fields of config.json beside those of `test_family_configs.BASE`.
    - `gguf_arch`: the family in the gguf package; None if plait reads no GGUF file of it.
    - `variants`: settings added to `settings`, by name; compared with transformers from safetensors.
    - `gguf_variants`: the variants that a GGUF file can express. llama.cpp has no windows for Qwen, no layers without
      experts, no other patterns for Gemma.
    - `packed_variants`: settings for the packed CPU decoder.
    """

    model_class: type[PreTrainedModel]
    settings: Mapping[str, Any]
    config_json: Mapping[str, Any]
    gguf_arch: gguf.MODEL_ARCH | None
    packed_variants: Mapping[str, Mapping[str, Any]]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gguf_variants: tuple[str, ...] = ()

    def build(self, variant: str = "", **changes: Any) -> PreTrainedModel:
        """A new model of `settings`, those of the variant and `changes`."""
        settings = {**self.settings, **(self.variants[variant] if variant else {}), **changes}
        return self.model_class(self.model_class.config_class(**settings))


FAMILY_CASES = {
    "llama": FamilyCase(
        model_class=LlamaForCausalLM,
        settings=GQA | dict(tie_word_embeddings=True, rope_parameters=ROPE),
        config_json={},
        gguf_arch=gguf.MODEL_ARCH.LLAMA,
        packed_variants={
            "tied": dict(tie_word_embeddings=True),
            "8 to a group": dict(num_attention_heads=8, num_key_value_heads=1, head_dim=64),
        },
        variants={
            "MHA, untied, biases": dict(
                num_key_value_heads=4,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=False,
                rope_parameters=None,
            ),
            "wide heads, linear rope": dict(
                num_key_value_heads=1, head_dim=32, tie_word_embeddings=False, rope_parameters=LINEAR
            ),
            "llama3 rope": dict(
                num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False, rope_parameters=LLAMA3
            ),
        },
        gguf_variants=("MHA, untied, biases", "wide heads, linear rope"),
    ),
    "mistral": FamilyCase(
        model_class=MistralForCausalLM,
        settings=GQA | dict(sliding_window=7),
        config_json={"sliding_window": 64},
        gguf_arch=gguf.MODEL_ARCH.LLAMA,
        packed_variants={"": dict(sliding_window=11)},
    ),
    "qwen2": FamilyCase(
        model_class=Qwen2ForCausalLM,
        settings=GQA | dict(tie_word_embeddings=True),
        config_json={
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 3,
            "rope_scaling": CONFIG_YARN,
        },
        gguf_arch=gguf.MODEL_ARCH.QWEN2,
        packed_variants={"": {}},
        variants={
            "upper window, YaRN": WINDOW | dict(tie_word_embeddings=False, rope_parameters=YARN),
            "YaRN": dict(tie_word_embeddings=False, rope_parameters=YARN),
        },
        gguf_variants=("YaRN",),
    ),
    "mimo": FamilyCase(
        model_class=MiMoForCausalLM,
        settings=GQA | dict(num_nextn_predict_layers=1),
        config_json={"num_nextn_predict_layers": 1, "use_sliding_window": False, "sliding_window": 64},
        gguf_arch=None,
        packed_variants={"": {}},
    ),
    "qwen3": FamilyCase(
        model_class=Qwen3ForCausalLM,
        settings=GQA | dict(head_dim=24, tie_word_embeddings=True),
        config_json={"head_dim": 128, "rope_scaling": CONFIG_YARN},
        gguf_arch=gguf.MODEL_ARCH.QWEN3,
        packed_variants={"": dict(head_dim=128)},
        variants={
            "biases, window, YaRN": WINDOW
            | dict(tie_word_embeddings=False, attention_bias=True, rope_parameters=YARN | {"attention_factor": 1.3})
        },
    ),
    "qwen3_moe": FamilyCase(
        model_class=Qwen3MoeForCausalLM,
        settings=GQA
        | dict(head_dim=24, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True),
        config_json={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        gguf_arch=gguf.MODEL_ARCH.QWEN3MOE,
        packed_variants={
            "": dict(num_experts=20, moe_intermediate_size=64, head_dim=128),
            "experts in some layers": dict(
                num_hidden_layers=4,
                decoder_sparse_step=2,
                num_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                norm_topk_prob=False,
                head_dim=64,
            ),
        },
        variants={
            "experts in some layers": dict(
                num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[1], norm_topk_prob=False
            )
        },
    ),
    "gemma2": FamilyCase(
        model_class=Gemma2ForCausalLM,
        settings=GQA | GEMMA2,
        config_json={"head_dim": 64, "sliding_window": 64, "query_pre_attn_scalar": 144},
        gguf_arch=gguf.MODEL_ARCH.GEMMA2,
        packed_variants={"": GEMMA2 | dict(sliding_window=11), "no caps": GEMMA2 | NO_CAPS},
        variants={
            "layer types, untied, biases, no caps": NO_CAPS
            | dict(
                num_hidden_layers=3,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                rope_parameters=LINEAR,
                tie_word_embeddings=False,
                attention_bias=True,
            )
        },
    ),
    "gemma3": FamilyCase(
        model_class=Gemma3ForCausalLM,
        settings=GQA
        | dict(head_dim=32, query_pre_attn_scalar=20, sliding_window=7, pad_token_id=0, num_hidden_layers=7),
        config_json={"head_dim": 64, "sliding_window": 64, "rope_local_base_freq": 5e3, "rope_theta": 5e5},
        gguf_arch=gguf.MODEL_ARCH.GEMMA3,
        packed_variants={
            "": dict(query_pre_attn_scalar=20, sliding_window=11, pad_token_id=0, num_hidden_layers=7),
        },
        variants={
            "layer types, two rope bases, untied": dict(
                num_hidden_layers=3,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                rope_parameters=TWO_ROPE_BASES,
                tie_word_embeddings=False,
                attention_bias=True,
            )
        },
    ),
    "phi3": FamilyCase(
        model_class=Phi3ForCausalLM,
        settings=GQA | dict(sliding_window=11, pad_token_id=0, eos_token_id=1),
        config_json={"rope_scaling": CONFIG_LONGROPE, "original_max_position_embeddings": 1024},
        gguf_arch=gguf.MODEL_ARCH.PHI3,
        packed_variants={
            "": dict(sliding_window=11, pad_token_id=0, eos_token_id=1),
            "partial rotation": dict(
                pad_token_id=0, eos_token_id=1, rope_parameters=ROPE | {"partial_rotary_factor": 0.75}
            ),
        },
        variants={
            "LongRoPE, short": dict(rope_parameters=LONGROPE | {"factor": 3.0}, original_max_position_embeddings=128),
            "partial rotation": dict(tie_word_embeddings=True, rope_parameters=ROPE | {"partial_rotary_factor": 0.75}),
        },
        gguf_variants=("LongRoPE, short", "partial rotation"),
    ),
    "smollm3": FamilyCase(
        model_class=SmolLM3ForCausalLM,
        settings=GQA | dict(num_hidden_layers=5, pad_token_id=0, tie_word_embeddings=True),
        config_json={"no_rope_layers": [1, 0, 1, 1] * 2, "tie_word_embeddings": False},
        gguf_arch=gguf.MODEL_ARCH.SMOLLM3,
        packed_variants={"": dict(pad_token_id=0, num_hidden_layers=5)},
        variants={
            "listed layers, YaRN, window, biases": dict(
                no_rope_layers=[0, 1, 1, 0, 1],
                use_sliding_window=True,
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
                rope_parameters=YARN,
                attention_bias=True,
                tie_word_embeddings=False,
            )
        },
    ),
    "mixtral": FamilyCase(
        model_class=MixtralForCausalLM,
        settings=GQA | dict(num_local_experts=6, num_experts_per_tok=2),
        config_json={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
        gguf_arch=gguf.MODEL_ARCH.LLAMA,
        packed_variants={"": dict(num_local_experts=5, num_experts_per_tok=2)},
        variants={"window, all experts": dict(sliding_window=9, num_local_experts=3, num_experts_per_tok=3)},
    ),
    "olmo2": FamilyCase(
        model_class=Olmo2ForCausalLM,
        settings=GQA | dict(pad_token_id=0),
        config_json={"rope_scaling": CONFIG_YARN},
        gguf_arch=gguf.MODEL_ARCH.OLMO2,
        packed_variants={
            "": dict(pad_token_id=0),
            "MHA": dict(pad_token_id=0, num_key_value_heads=4, tie_word_embeddings=True),
        },
        variants={
            "one KV head, tied, biases": dict(
                num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True, rope_parameters=YARN
            ),
            "MHA": dict(num_key_value_heads=4, rope_parameters=LINEAR),
        },
        gguf_variants=("one KV head, tied, biases", "MHA"),
    ),
    "granite": FamilyCase(
        model_class=GraniteForCausalLM,
        settings=GQA | GRANITE_FACTORS,
        config_json=GRANITE_FACTORS,
        gguf_arch=gguf.MODEL_ARCH.GRANITE,
        packed_variants={"": GRANITE_FACTORS},
        variants={"biases, tied": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)},
        gguf_variants=("biases, tied",),
    ),
}
MODEL_CASES = [(family, variant) for family, case in FAMILY_CASES.items() for variant in ("", *case.variants)]
GGUF_CASES = [
    (family, variant)
    for family, case in FAMILY_CASES.items()
    if case.gguf_arch is not None
    for variant in ("", *case.gguf_variants)
]


def case_id(family_and_variant: tuple[str, str]) -> str:
    """A readable test id: the family, and the variant if there is one."""
    return ", ".join(part for part in family_and_variant if part)
