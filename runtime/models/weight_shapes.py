"""Names and shapes of the weights of a model, under the names of transformers."""

from __future__ import annotations

from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME

MTP_LAYER = "model.mtp_layers.0."


def expected_shapes(config: ModelConfig) -> WeightShapes:
    """Name and shape of every tensor that a model of this config needs, in the order of the layers."""
    shapes: WeightShapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_shapes(config, i).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def mtp_shapes(config: ModelConfig) -> WeightShapes:
    """Name and shape of every tensor of the model's first MTP layer: those of a layer, and what joins its inputs."""
    size = config.hidden_size
    shapes = _layer_shapes(config, 0) | {"input_proj.weight": (size, 2 * size)}
    shapes |= {f"{name}_layernorm.weight": (size,) for name in ("token", "hidden", "final")}
    return {MTP_LAYER + name: shape for name, shape in shapes.items()}


def _layer_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    """The weights of a layer, by their names in it."""
    form = FAMILIES_BY_NAME[config.architecture].layer
    shapes: WeightShapes = {f"{name}.weight": (config.hidden_size,) for name in form.norms if name is not None}
    if form.qk_norms is not None:
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            num_normed = heads if form.qk_norms == "joint" else 1  # all heads share one weight
            shapes[f"self_attn.{name}_norm.weight"] = (num_normed * config.head_dim,)
    return shapes | _attention_shapes(config, form.fused_matrices) | _mlp_shapes(config, form.fused_matrices, layer)


def _attention_shapes(config: ModelConfig, is_fused: bool) -> WeightShapes:
    """q, k, v and o, with biases as the config says."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    rows = {"q": queries, "k": config.num_kv_heads * config.head_dim, "v": config.num_kv_heads * config.head_dim}
    shapes: WeightShapes = {}
    for name, size in {"qkv": sum(rows.values())}.items() if is_fused else rows.items():
        shapes |= _linear_shapes(f"self_attn.{name}_proj", size, hidden, config.attention_bias)
    return shapes | _linear_shapes("self_attn.o_proj", hidden, queries, config.output_bias)


def _mlp_shapes(config: ModelConfig, is_fused: bool, layer: int) -> WeightShapes:
    """The router and the experts of a layer that has them, else gate, up and down, with biases as the config says."""
    hidden, wide, bias, experts = config.hidden_size, config.intermediate_size, config.mlp_bias, config.experts
    if experts is not None and experts.layers[layer]:
        matrix = (experts.num_experts, experts.intermediate_size, hidden)
        return {
            "mlp.gate.weight": (experts.num_experts, hidden),
            "mlp.experts.gate_proj.weight": matrix,
            "mlp.experts.up_proj.weight": matrix,
            "mlp.experts.down_proj.weight": (experts.num_experts, hidden, experts.intermediate_size),
        }
    shapes: WeightShapes = {}
    for name, rows in {"gate_up": 2 * wide}.items() if is_fused else {"gate": wide, "up": wide}.items():
        shapes |= _linear_shapes(f"mlp.{name}_proj", rows, hidden, bias)
    return shapes | _linear_shapes("mlp.down_proj", hidden, wide, bias)


def _linear_shapes(name: str, rows: int, columns: int, bias: bool) -> WeightShapes:
    """One linear layer: weight [rows, columns], bias [rows]."""
    shapes: WeightShapes = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes
