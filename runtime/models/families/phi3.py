"""Phi-3, Phi-3.5 and Phi-4: fused q/k/v and gate/up matrices, and LongRoPE (arXiv:2404.14219).

Phi-4-mini rotates only the leading dimensions of each head. Attention scores do not change when the dimensions of
queries and keys are permuted alike. So the loader permutes them: each rotating pair goes where the rotary operator of
whole heads looks for it, and the other dimensions form pairs of angle 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.errors import CorruptModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import LayerForm, ModelFamily
from plait.runtime.models.value_checks import checked_float


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    rope = dict(hf_config.rope_parameters(config))
    if rope.get("type", rope.get("rope_type")) == "yarn":  # early Phi-3 files use this name for LongRoPE
        rope["rope_type"] = "longrope"
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    share = 1.0 if share is None else checked_float("partial_rotary_factor", share, 0.0, 1.0 + 1e-9)
    fields = hf_config.common_fields(config, rope=rope, full_rotary=False)
    if type(fields["head_dim"]) is not int:
        raise CorruptModel("the model's head_dim is not a whole number")
    return dict(
        **fields,
        sliding_window=config.get("sliding_window"),
        rotary_dim=int(fields["head_dim"] * share),
    )


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields, full_rotary=False)
    rotary = keys.get("rope.dimension_count", fields["head_dim"])
    return dict(**fields, rotary_dim=rotary)


PHI3 = ModelFamily(
    name="phi3",
    hf_architectures=("Phi3ForCausalLM", "Phi3Model"),
    gguf_architecture="phi3",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    gguf_permuted_qk=False,
    gguf_layer_names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    layer=LayerForm(fused_matrices=True),
)
