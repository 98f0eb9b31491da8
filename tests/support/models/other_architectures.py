"""Tiny random models of the architectures that run by transformers, most without a family of plait's."""

from __future__ import annotations

from typing import Any

import transformers

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=128)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
GQA = SIZES | IDS | dict(num_attention_heads=4, num_key_value_heads=2)
MHA = SIZES | IDS | dict(num_attention_heads=4)
# name -> (class of transformers, arguments of its config)
OTHER_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # Soft-capped scores and logits, one layer with a window, a scale that is not the head size's.
    "gemma2": (
        "Gemma2",
        GQA | dict(head_dim=16, query_pre_attn_scalar=20, sliding_window=9, attn_logit_softcapping=2.0),
    ),
    "smollm3": ("SmolLM3", GQA | dict(no_rope_layers=[1, 0])),
    "olmo2": ("Olmo2", GQA),
    "granite": ("Granite", GQA | dict(attention_multiplier=0.3, logits_scaling=4.0, residual_multiplier=0.5)),
    "cohere": ("Cohere", GQA | dict(logit_scale=0.25)),
    "cohere2": ("Cohere2", GQA | dict(sliding_window=9, layer_types=["sliding_attention", "full_attention"])),
    "glm4": ("Glm4", GQA | dict(head_dim=8)),
    "starcoder2": ("Starcoder2", GQA | dict(sliding_window=9)),
    "falcon": ("Falcon", MHA | dict(alibi=False, new_decoder_architecture=False, multi_query=True)),
    "falcon_gqa": ("Falcon", MHA | dict(alibi=False, new_decoder_architecture=True, num_kv_heads=2)),
    "gpt_neox": ("GPTNeoX", MHA),
    "mixtral": ("Mixtral", GQA | dict(num_local_experts=4, num_experts_per_tok=2)),
    "gpt_oss": (
        "GptOss",
        GQA | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=9, rope_parameters=None),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        MHA
        | dict(num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8)
        | dict(v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1)
        | dict(moe_intermediate_size=16, first_k_dense_replace=1),
    ),
    "opt": ("OPT", MHA | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "gpt2": ("GPT2", MHA),
}


def build_other(name: str, **changes: Any) -> transformers.PreTrainedModel:
    """A new model of OTHER_ARCHITECTURES, with `changes` to its config."""
    prefix, settings = OTHER_ARCHITECTURES[name]
    settings = settings | changes
    if settings.get("rope_parameters", 0) is None:
        del settings["rope_parameters"]
    classes = [f"{prefix}LMHeadModel", f"{prefix}ForCausalLM"]
    model_class = next(getattr(transformers, found) for found in classes if hasattr(transformers, found))
    return model_class(model_class.config_class(**settings))
