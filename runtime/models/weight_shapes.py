"""Names and shapes of the weights of a model, under the names of transformers."""

from __future__ import annotations

from collections.abc import Callable

from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig

LayerShapes = Callable[[ModelConfig, int], WeightShapes]  # (config, layer index) -> names relative to the layer


def model_shapes(config: ModelConfig, layer_shapes: LayerShapes) -> WeightShapes:
    """Name and shape of every tensor of the model, in the order of the layers."""
    shapes: WeightShapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(config, i).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def attention_shapes(config: ModelConfig) -> WeightShapes:
    """q, k, v and o, with biases as the config says."""
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: WeightShapes = {}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes |= linear_shapes(f"self_attn.{name}_proj", rows, hidden, config.attention_bias)
    return shapes | linear_shapes("self_attn.o_proj", hidden, queries, config.output_bias)


def qk_norm_shapes(config: ModelConfig) -> WeightShapes:
    """The norms of queries and keys; all heads share one weight."""
    return {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}


def joint_qk_norm_shapes(config: ModelConfig) -> WeightShapes:
    """The norms of all queries and of all keys of a token, each over the heads together."""
    return {
        f"self_attn.{name}_norm.weight": (heads * config.head_dim,)
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads))
    }


def mlp_shapes(config: ModelConfig) -> WeightShapes:
    """gate, up and down, with biases as the config says."""
    hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    gate_up = linear_shapes("mlp.gate_proj", intermediate, hidden, bias) | linear_shapes(
        "mlp.up_proj", intermediate, hidden, bias
    )
    return gate_up | linear_shapes("mlp.down_proj", hidden, intermediate, bias)


def experts_or_mlp_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    """The router and the experts of a layer that has them, else its MLP."""
    experts = config.experts
    if experts is None or not experts.layers[layer]:
        return mlp_shapes(config)
    wide = (experts.num_experts, experts.intermediate_size, config.hidden_size)
    return {
        "mlp.gate.weight": (experts.num_experts, config.hidden_size),
        "mlp.experts.gate_proj.weight": wide,
        "mlp.experts.up_proj.weight": wide,
        "mlp.experts.down_proj.weight": (experts.num_experts, config.hidden_size, experts.intermediate_size),
    }


def norm_shapes(config: ModelConfig, *names: str) -> WeightShapes:
    """Norms over the hidden state, by module name."""
    return {f"{name}.weight": (config.hidden_size,) for name in names}


def linear_shapes(name: str, rows: int, columns: int, bias: bool = False) -> WeightShapes:
    """One linear layer: weight [rows, columns], bias [rows]."""
    shapes: WeightShapes = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def llama_layer_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    """The weights of a Llama layer."""
    norms = norm_shapes(config, "input_layernorm", "post_attention_layernorm")
    return norms | attention_shapes(config) | mlp_shapes(config)


def qk_norm_layer_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    """The weights of a Llama layer with norms on queries and keys."""
    return llama_layer_shapes(config, layer) | qk_norm_shapes(config)
