"""Loads a checkpoint into the CPU's decoder for packed weights. Imports llvmlite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.decoder import AMX_MIN_TOKENS, CpuDecoder
from plait.kernels.cpu.decoder_weights import DecoderWeights, Experts, LayerWeights
from plait.kernels.cpu.gemm import packed_weights
from plait.kernels.cpu.gemm.packed_weights import PackedPair, PackedWeight, StoredWeight
from plait.kernels.cpu.kernel_types import HeadLayout
from plait.kernels.cpu.vector_ops import GELU, SILU
from plait.runtime.config import WeightFormat
from plait.runtime.model_files.safetensors_bytes import BYTES, widen
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import LayerForm
from plait.runtime.models.loading.packed_store import Packed, PackedStore, PackingThreads
from plait.runtime.models.loading.rope_tables import build_rope_tables
from plait.runtime.models.quantization import WEIGHT_BITS, LoadProgress
from plait.runtime.models.registry import FAMILIES_BY_NAME
from plait.runtime.models.rope import partial_rotary_permutation

Floats = npt.NDArray[np.float32]


ACTIVATIONS = {"silu": SILU, "gelu": GELU}


class NotPackable(Exception):
    """The format is "as-stored", and the packed kernels cannot use a weight as it is stored."""


class PackedWeightLoader:
    """Reads weights by name, quantizes those that need it, and packs them for the CPU kernels.

    `unused` holds the names of the checkpoint's weights that have not been read yet.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Checkpoint,
        weight_format: WeightFormat,
        threads: PackingThreads,
    ) -> None:
        self.config, self.weights, self.weight_format = config, weights, weight_format
        self._form = FAMILIES_BY_NAME[config.architecture].layer
        self._run = threads.run
        self.store = PackedStore(weights, weight_format, threads)
        self.names = frozenset(weights.names())
        self.unused = set(self.names)

    def load_stored(self, name: str) -> StoredWeight:
        """The matrix, as stored where the format permits it. Raises NotPackable (only for "as-stored").

        The matrices of experts [E, O, C] are one [E O, C].
        """
        stored_type, blocks, shape = self.weights.raw_blocks(name)
        shape = (math.prod(shape[:-1]), shape[-1])
        exact = packed_weights.from_gguf(blocks, stored_type, shape)
        if exact is not None and (
            self.weight_format == "as-stored" or exact.layout.bits <= WEIGHT_BITS[self.weight_format]
        ):
            return exact
        if self.weight_format == "as-stored":
            raise NotPackable(f"{name} is stored as {stored_type}")
        bits = WEIGHT_BITS[self.weight_format]
        if stored_type in BYTES:
            read = partial(_widened_rows, stored_type, blocks)
            return packed_weights.quantize_rows(shape, read, bits, self._run)
        return packed_weights.quantize(self.float32_array(name).reshape(shape), bits, self._run)

    def load_packed(self, name: str) -> PackedWeight:
        """The weight of the named linear layer."""
        return self._load_one(name, lambda: packed_weights.pack(self.load_stored(f"{name}.weight"), self._run), name)

    def _load_one(self, key: str, pack: Callable[[], Packed], *names: str) -> Packed:
        """The weight or pair `key` of the store, which is packed from the named linear layers."""
        self.unused.difference_update(f"{name}.weight" for name in names)
        (packed,) = self.store.get(key, lambda: [pack()])
        return packed

    def float32_array(self, name: str) -> Floats:
        """The weight in float32."""
        self.unused.discard(name)
        return self.weights.float32_array(name)

    def load_norm(self, name: str) -> Floats:
        """The factors that a norm multiplies by."""
        weight = self.float32_array(name)
        return weight + np.float32(1.0) if self._form.unit_norms and self.weights.container != "gguf" else weight

    def load_layer(self, index: int) -> LayerWeights:
        """Layer `index`, which must have the weights that the family describes; head norms are optional."""
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        projections = [f"{attention}.{part}_proj" for part in "qkv"]
        fused = self._form.fused_matrices
        biases = [self.float32_array(f"{name}.bias") for name in projections if f"{name}.bias" in self.names]
        norm, post_norm, mlp_norm, post_mlp_norm = (
            None if name is None else self.load_norm(f"{prefix}.{name}.weight") for name in self._form.norms
        )
        has_experts = config.experts is not None and config.experts.layers[index]
        router = self.float32_array(f"{mlp}.gate.weight") if has_experts else None
        mlp = f"{mlp}.experts" if has_experts else mlp
        gate_up = [f"{mlp}.gate_up_proj"] if fused else [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return LayerWeights(
            norm=norm,
            qkv=self._load_qkv(attention, [f"{attention}.qkv_proj"] if fused else projections),
            bias=np.concatenate(biases) if biases else None,
            head_norms=self._head_norms(attention),
            output=self.load_packed(f"{attention}.o_proj"),
            post_norm=post_norm,
            mlp_norm=mlp_norm,
            gate_up=self._load_one(f"{mlp}.gate_up", lambda: self._pack_gate_up(gate_up), *gate_up),
            down=self.load_packed(f"{mlp}.down_proj"),
            post_mlp_norm=post_mlp_norm,
            window=config.window(index),
            rope_table=config.rope_table(index),
            router=router,
        )

    def _load_all(self, *names: str) -> list[StoredWeight]:
        """The weights of the named linear layers."""
        return [self.load_stored(f"{name}.weight") for name in names]

    def _load_qkv(self, prefix: str, names: Sequence[str]) -> Sequence[PackedWeight]:
        """q, k and v of the attention `prefix`, to be multiplied as one, from three matrices or one."""
        self.unused.difference_update(f"{name}.weight" for name in names)

        def pack() -> Sequence[PackedWeight]:
            stored = self._load_all(*names)
            return packed_weights.pack_concatenated(
                stored if len(stored) > 1 else [self._with_rotated_rows(*stored)], self._run
            )

        return self.store.get(f"{prefix}.qkv", pack)

    def _with_rotated_rows(self, weight: StoredWeight) -> StoredWeight:
        """q, k and v in one matrix; rows of q and k in the order of `partial_rotary_permutation`."""
        config = self.config
        rows = np.arange(len(weight.rows)).reshape(-1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        rows[:rotated] = rows[:rotated, partial_rotary_permutation(config.effective_rotary_dim, config.head_dim)]
        return StoredWeight(weight.rows[rows.reshape(-1)], weight.layout)

    def _pack_gate_up(self, names: Sequence[str]) -> PackedPair:
        """gate and up, from two matrices or one."""
        stored = self._load_all(*names)
        if len(stored) == 1:
            stored = [StoredWeight(rows, stored[0].layout) for rows in np.split(stored[0].rows, 2)]
        gate, up = stored
        return packed_weights.pack_pair(gate, up, self._run)

    def _head_norms(self, prefix: str) -> Floats | None:
        """The norm weights of all query and key heads, [(H + G) * D]; None if the model has no such norms."""
        if f"{prefix}.q_norm.weight" not in self.names:
            return None
        query, key = (self.load_norm(f"{prefix}.{part}_norm.weight") for part in "qk")
        if self._form.qk_norms == "joint":
            return np.concatenate([query, key])
        return np.concatenate([query] * self.config.num_heads + [key] * self.config.num_kv_heads)


def _widened_rows(stored_type: str, rows: npt.NDArray[np.uint8], part: slice) -> Floats:
    return widen(stored_type, rows[part], (len(rows[part]), -1))


def load_packed_decoder(
    config: ModelConfig,
    weights: Checkpoint,
    weight_format: WeightFormat,
    threads: int,
    deterministic: bool = False,
    progress: LoadProgress = lambda fraction: None,
) -> CpuDecoder:
    """The model with packed weights.

    `deterministic`: use one kernel for every batch size, so that a token's bits do not depend on the other tokens of
    its step. With AMX this is the AMX kernel, which is faster for many tokens and 1.5 times slower for one.

    Raises NotPackable as `PackedWeightLoader.load_stored` does, and ValueError if the packed decoder lacks something
    that the model needs.
    """
    form = FAMILIES_BY_NAME[config.architecture].layer
    if config.effective_rotary_dim != config.head_dim and not form.fused_matrices:
        raise ValueError(f"the packed decoder lacks partial rotation, which {config.architecture} needs")
    with PackingThreads(threads) as packing_threads:
        loader = PackedWeightLoader(config, weights, weight_format, packing_threads)
        decoder_weights = _load_weights(config, loader, form, progress)
    loader.store.save()
    amx_min_tokens = 1 if deterministic or _all_floats(decoder_weights.layers) else AMX_MIN_TOKENS
    return CpuDecoder(decoder_weights, threads, amx_min_tokens)


def _load_weights(
    config: ModelConfig, loader: PackedWeightLoader, form: LayerForm, progress: LoadProgress
) -> DecoderWeights:
    embedding = loader.load_packed("model.embed_tokens")
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.load_layer(index))
        progress((index + 1) / config.num_layers)
    norm = loader.load_norm("model.norm.weight")
    head = embedding if config.tie_word_embeddings else loader.load_packed("lm_head")
    if loader.unused:
        raise ValueError(f"the packed decoder does not use {min(loader.unused)} of the family {config.architecture}")
    return DecoderWeights(
        embedding=embedding,
        embedding_scale=config.embedding_scale,
        layers=layers,
        norm=norm,
        head=head,
        rope_tables=build_rope_tables(config),
        heads=HeadLayout(
            config.num_heads // config.num_kv_heads,
            config.num_kv_heads,
            config.head_dim,
            config.softmax_scale,
            config.attention_softcap,
        ),
        eps=config.rms_norm_eps,
        activation=ACTIVATIONS[form.activation],
        joint_head_norms=form.qk_norms == "joint",
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
        experts=None
        if config.experts is None
        else Experts(config.experts.num_experts, config.experts.experts_per_token, config.experts.normalize_topk),
    )


def _all_floats(layers: Sequence[LayerWeights]) -> bool:
    """Whether all matrices of the layers are floats. Then AMX is faster and more exact for any number of tokens."""
    weights = (
        weight
        for layer in layers
        for weight in (*layer.qkv, layer.output, layer.gate_up.first, layer.gate_up.second, layer.down)
    )
    return all(weight.layout.is_float for weight in weights)
