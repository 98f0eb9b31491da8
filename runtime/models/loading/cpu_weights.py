"""Builds the CPU's packed decoder from a checkpoint; imports numba.

Knows: names of weights. Must not know: how products are computed, or whether this form was a good choice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.decoder import AMX_MIN_TOKENS, CpuDecoder, DecoderWeights, LayerWeights
from plait.kernels.cpu.gemm import packed_weights
from plait.kernels.cpu.gemm.packed_weights import PackedWeight, QuantizedWeight
from plait.kernels.cpu.kernel_types import HeadLayout
from plait.kernels.cpu.vector_ops import SILU
from plait.runtime.config import WeightFormat
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.quantization import WEIGHT_BITS, LoadProgress

Floats = npt.NDArray[np.float32]


class NotPackable(Exception):
    """A weight is not stored in a form that is used as it is."""


class PackedWeightLoader:
    """Loads weights in one form."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, weight_format: WeightFormat) -> None:
        self.config, self.weights, self.weight_format = config, weights, weight_format
        self.names = set(weights.names())

    def load_quantized(self, name: str) -> QuantizedWeight:
        """NotPackable if the form is "as-stored" and the file has another."""
        if self.weights.container == "gguf":
            quantization, raw, shape = self.weights.raw(name)
            exact = packed_weights.from_gguf(raw, quantization, shape)
            if exact is not None and (
                self.weight_format == "as-stored" or exact.bits <= WEIGHT_BITS[self.weight_format]
            ):
                return exact
            found = quantization
        else:
            found = "plain numbers"
        if self.weight_format == "as-stored":
            raise NotPackable(f"{name} is stored as {found}")
        return packed_weights.quantize(self.float32_array(name), WEIGHT_BITS[self.weight_format])

    def load_packed(self, *names: str) -> PackedWeight:
        """The named weights as one, their outputs one after the other."""
        return packed_weights.pack(
            packed_weights.concat_outputs([self.load_quantized(f"{name}.weight") for name in names])
        )

    def float32_array(self, name: str) -> Floats:
        return self.weights.float32_array(name)

    def load_layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        parts = [f"{attention}.{part}_proj" for part in "qkv"]
        biases = [self.float32_array(f"{part}.bias") for part in parts if f"{part}.bias" in self.names]
        gate_up = packed_weights.interleave_tiles(
            *(self.load_quantized(f"{mlp}.{part}_proj.weight") for part in ("gate", "up"))
        )
        return LayerWeights(
            norm=self.float32_array(f"{prefix}.input_layernorm.weight"),
            qkv=self.load_packed(*parts),
            bias=np.concatenate(biases) if biases else None,
            head_norms=self._head_norms(attention),
            output=self.load_packed(f"{attention}.o_proj"),
            post_norm=None,
            mlp_norm=self.float32_array(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=packed_weights.pack(gate_up),
            down=self.load_packed(f"{mlp}.down_proj"),
            post_mlp_norm=None,
            window=config.window(index),
            rope_table=int(config.is_sliding(index) and config.sliding_rope_theta is not None),
        )

    def _head_norms(self, prefix: str) -> Floats | None:
        if f"{prefix}.q_norm.weight" not in self.names:
            return None
        query, key = (self.float32_array(f"{prefix}.{part}_norm.weight") for part in "qk")
        return np.concatenate([query] * self.config.num_heads + [key] * self.config.num_kv_heads)


def load_packed_decoder(
    config: ModelConfig,
    weights: Checkpoint,
    weight_format: WeightFormat,
    threads: int,
    deterministic: bool = False,
    progress: LoadProgress = lambda share: None,
) -> CpuDecoder:
    """The model with packed weights. NotPackable as in `PackedWeightLoader.load_quantized`.

    `deterministic`: one form of products, so that a token's bits do not depend on how many share its step; where there
    is AMX the one that is faster for many, though a single row takes half as long again.
    """
    loader = PackedWeightLoader(config, weights, weight_format)
    embedding = loader.load_packed("model.embed_tokens")
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.load_layer(index))
        progress((index + 1) / config.num_layers)
    return CpuDecoder(
        DecoderWeights(
            embedding=embedding,
            embedding_scale=1.0,
            layers=layers,
            norm=loader.float32_array("model.norm.weight"),
            head=embedding if config.tie_word_embeddings else loader.load_packed("lm_head"),
            rope_tables=build_rope_tables(config),
            heads=HeadLayout(
                config.num_heads // config.num_kv_heads, config.num_kv_heads, config.head_dim, config.softmax_scale
            ),
            eps=config.rms_norm_eps,
            activation=SILU,
        ),
        threads,
        1 if deterministic else AMX_MIN_TOKENS,
    )


def build_rope_tables(config: ModelConfig) -> list[tuple[Floats, Floats]]:
    """cos and sin [context, D / 2] of the model; the families that are packed have one table and turn whole heads."""
    positions = np.arange(config.context_length, dtype=np.float32)
    angles = np.outer(positions, np.array(config.inverse_frequencies(), np.float32))
    attention_factor = np.float32(config.rope_scaling.attention_factor if config.rope_scaling else 1.0)
    return [(np.cos(angles) * attention_factor, np.sin(angles) * attention_factor)]
