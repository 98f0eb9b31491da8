"""Builds the CPU's packed decoder from a checkpoint; imports numba.

Knows: names of weights. Must not know: how products are computed, or whether this form was a good choice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.kernels import cpu_packed
from plait.kernels.cpu_decoder import WIDE_FROM, CpuDecoder, DecoderWeights, LayerWeights
from plait.kernels.cpu_packed import Blocks, Packed
from plait.kernels.cpu_parts import Heads
from plait.kernels.cpu_rows import SILU
from plait.runtime.config import WeightForm
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.forms import BITS, Progress
from plait.runtime.models.source import Checkpoint

Floats = npt.NDArray[np.float32]


class NotStored(Exception):
    """A weight is not stored in a form that is used as it is."""


class Builder:
    """Loads weights in one form."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, form: WeightForm) -> None:
        self.config, self.weights, self.form = config, weights, form
        self.names = set(weights.names())

    def blocks(self, name: str) -> Blocks:
        """NotStored if the form is "as-stored" and the file has another."""
        if self.weights.container == "gguf":
            quantization, raw, shape = self.weights.raw(name)
            exact = cpu_packed.from_gguf(raw, quantization, shape)
            if exact is not None and (self.form == "as-stored" or exact.bits <= BITS[self.form]):
                return exact
            found = quantization
        else:
            found = "plain numbers"
        if self.form == "as-stored":
            raise NotStored(f"{name} is stored as {found}")
        return cpu_packed.rounded(self.floats(name), BITS[self.form])

    def packed(self, *names: str) -> Packed:
        """The named weights as one, their outputs one after the other."""
        return cpu_packed.pack(cpu_packed.stacked([self.blocks(f"{name}.weight") for name in names]))

    def floats(self, name: str) -> Floats:
        return self.weights.floats(name)

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        parts = [f"{attention}.{part}_proj" for part in "qkv"]
        biases = [self.floats(f"{part}.bias") for part in parts if f"{part}.bias" in self.names]
        gated = cpu_packed.alternating(*(self.blocks(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")))
        return LayerWeights(
            norm=self.floats(f"{prefix}.input_layernorm.weight"),
            qkv=self.packed(*parts),
            bias=np.concatenate(biases) if biases else None,
            head_norms=self._head_norms(attention),
            output=self.packed(f"{attention}.o_proj"),
            post_norm=None,
            mlp_norm=self.floats(f"{prefix}.post_attention_layernorm.weight"),
            gated=cpu_packed.pack(gated),
            down=self.packed(f"{mlp}.down_proj"),
            post_mlp_norm=None,
            window=config.window(index),
            rotation=int(config.is_local(index) and config.local_rope_theta is not None),
        )

    def _head_norms(self, prefix: str) -> Floats | None:
        if f"{prefix}.q_norm.weight" not in self.names:
            return None
        query, key = (self.floats(f"{prefix}.{part}_norm.weight") for part in "qk")
        return np.concatenate([query] * self.config.num_heads + [key] * self.config.num_kv_heads)


def packed_decoder(
    config: ModelConfig,
    weights: Checkpoint,
    form: WeightForm,
    threads: int,
    deterministic: bool = False,
    progress: Progress = lambda share: None,
) -> CpuDecoder:
    """The model with packed weights. NotStored as in `Builder.blocks`.

    `deterministic`: one form of products, so that a token's bits do not depend on how many share its step; where there
    is AMX the one that is faster for many, though a single row takes half as long again.
    """
    builder = Builder(config, weights, form)
    embedding = builder.packed("model.embed_tokens")
    layers = []
    for index in range(config.num_layers):
        layers.append(builder.layer(index))
        progress((index + 1) / config.num_layers)
    return CpuDecoder(
        DecoderWeights(
            embedding=embedding,
            embedding_scale=1.0,
            layers=layers,
            norm=builder.floats("model.norm.weight"),
            head=embedding if config.tie_word_embeddings else builder.packed("lm_head"),
            rotations=rotary_tables(config),
            heads=Heads(
                config.num_heads // config.num_kv_heads, config.num_kv_heads, config.head_dim, config.score_scale
            ),
            eps=config.rms_norm_eps,
            activation=SILU,
        ),
        threads,
        1 if deterministic else WIDE_FROM,
    )


def rotary_tables(config: ModelConfig) -> list[tuple[Floats, Floats]]:
    """cos and sin [context, D / 2] of the model; the families that are packed have one table and turn whole heads."""
    positions = np.arange(config.context_length, dtype=np.float32)
    angles = np.outer(positions, np.array(config.inverse_frequencies(), np.float32))
    magnitude = np.float32(config.rope_scaling.magnitude if config.rope_scaling else 1.0)
    return [(np.cos(angles) * magnitude, np.sin(angles) * magnitude)]
