"""Chooses the form of a model's weights, and builds the CPU's packed decoder from a checkpoint.

Knows: names of weights, the families that fit. Must not know: how products are computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.kernels import cpu_packed
from plait.kernels.cpu_decoder import CpuDecoder, DecoderWeights, LayerWeights, missing_features
from plait.kernels.cpu_packed import Blocks, Packed
from plait.kernels.cpu_parts import Heads
from plait.kernels.cpu_rows import SILU
from plait.kernels.select import Kernels
from plait.runtime.config import WeightForm
from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.decoder import Decoder, rotary_tables
from plait.runtime.models.registry import MODELS
from plait.runtime.models.source import Checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BITS = {"int8": 8, "int4": 4}
Progress = Callable[[float], None]


def load_model(
    config: ModelConfig,
    weights: Checkpoint,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    form: WeightForm,
    progress: Progress = lambda share: None,
) -> Decoder | CpuDecoder:
    """The model, its weights in the form asked for; InputError where a form cannot be had.

    "as-stored": blocks of 4 and 8 bits as they are where this CPU and this model allow, else `dtype`.
    """
    reason = why_not(config, dtype, device)
    if reason is None and form != "bf16":
        try:
            return packed_decoder(config, weights, form, progress)
        except NotStored:
            pass  # only "as-stored" raises it: the file's own form is another, and is used as `dtype`
    elif form in BITS:
        raise InputError(f"weights cannot be {form}: {reason}")
    return MODELS[config.architecture](config, weights, kernels, dtype, device, progress)


def why_not(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this model has no packed form here; None if it has."""
    if device.type != "cpu":
        return f"packed weights are for CPUs, not for {device}"
    if missing := missing_features():
        return f"this CPU has no {', '.join(missing)}"
    if dtype != torch.bfloat16:
        return f"packed weights go with bfloat16, not with {str(dtype).removeprefix('torch.')}"
    if config.architecture not in FAMILIES:
        return f"models of the family {config.architecture} have no packed form"
    if config.output_bias or config.mlp_bias:
        return "biases outside of q, k and v have no packed form"
    widths = (config.hidden_size, config.intermediate_size, config.head_dim)
    if any(width % 32 for width in widths) or config.head_dim > 256:
        return f"the sizes {widths} are not all multiples of 32, or heads are wider than 256"
    return None


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
            exact = cpu_packed.from_gguf(torch.from_numpy(raw.copy()), quantization, shape)
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

    def floats(self, name: str) -> torch.Tensor:
        return self.weights.tensor(name, torch.float32, "cpu").contiguous()

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        parts = [f"{attention}.{part}_proj" for part in "qkv"]
        biases = [self.floats(f"{part}.bias") for part in parts if f"{part}.bias" in self.names]
        gated = cpu_packed.alternating(*(self.blocks(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")))
        return LayerWeights(
            norm=self.floats(f"{prefix}.input_layernorm.weight"),
            qkv=self.packed(*parts),
            bias=torch.cat(biases) if biases else None,
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

    def _head_norms(self, prefix: str) -> torch.Tensor | None:
        if f"{prefix}.q_norm.weight" not in self.names:
            return None
        query, key = (self.floats(f"{prefix}.{part}_norm.weight") for part in "qk")
        return torch.cat([query] * self.config.num_heads + [key] * self.config.num_kv_heads)


def packed_decoder(
    config: ModelConfig, weights: Checkpoint, form: WeightForm, progress: Progress = lambda share: None
) -> CpuDecoder:
    """The model with packed weights. NotStored as in `Builder.blocks`."""
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
            rotations=rotary_tables(config, torch.device("cpu")),
            heads=Heads(
                config.num_heads // config.num_kv_heads, config.num_kv_heads, config.head_dim, config.score_scale
            ),
            eps=config.rms_norm_eps,
            gate=SILU,
        )
    )
