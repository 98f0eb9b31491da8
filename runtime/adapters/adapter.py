"""A LoRA adapter: low-rank changes of a model's linear layers (Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from plait.runtime.arrays import Float32Array
from plait.runtime.errors import CorruptModel, InputError
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.rope import partial_rotary_permutation

MAX_RANK = 1024
LayerGroup = Literal["qkv", "output", "gate_up", "down"]
GROUPS: tuple[LayerGroup, ...] = ("qkv", "output", "gate_up", "down")  # the products of a layer, in their order
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
_MODULES: Mapping[LayerGroup, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_FUSED_MODULES: Mapping[LayerGroup, tuple[str, ...]] = {
    **_MODULES,
    "qkv": ("self_attn.qkv_proj",),
    "gate_up": ("mlp.gate_up_proj",),
}


@dataclass(frozen=True)
class LowRankUpdate:
    """The change of one linear layer with N outputs and K inputs: outputs += (inputs @ down.T) @ up.T + bias.

    The inputs of the embedding are the tokens of the vocabulary, of which one is 1 and the others are 0.
    """

    down: Float32Array  # [r, K]
    up: Float32Array  # [N, r], with the adapter's scale
    bias: Float32Array | None = None  # [N]


ReadUpdates = Callable[[], Mapping[str, LowRankUpdate]]
"""Reads the numbers of an adapter whose headers are checked: its updates by module. Raises CorruptModel."""


class PlacedUpdate(NamedTuple):
    """The change of one of the linear layers that a product computes together. `begin`: its first output."""

    begin: int
    update: LowRankUpdate


@dataclass(frozen=True)
class Adapter:
    """The updates of an adapter by the names of their modules ("model.layers.0.self_attn.q_proj")."""

    name: str
    updates: Mapping[str, LowRankUpdate]

    @classmethod
    def of(cls, name: str, updates: Mapping[str, LowRankUpdate]) -> Adapter:
        """The adapter of updates whose shapes `check_shapes` has checked. Raises InputError, which names the module."""
        if not any(update.up.any() or (update.bias is not None and update.bias.any()) for update in updates.values()):
            raise InputError(f"the adapter {name!r} would change nothing: every lora_B is zero, or its scale")
        for module, update in updates.items():
            if not all(part is None or np.isfinite(part).all() for part in (update.down, update.up, update.bias)):
                raise InputError(f"the adapter {name!r} has values that are not finite at {module}")
        return cls(name, updates)

    def digest(self) -> str:
        """32 hexadecimal digits of all numbers; adapters with equal ones compute the same."""
        digest = hashlib.blake2b(digest_size=16)
        for module in sorted(self.updates):
            update = self.updates[module]
            digest.update(f"{module} {update.down.shape} {update.up.shape} {update.bias is not None}\n".encode())
            for part in (update.down, update.up, update.bias):
                if part is not None:
                    digest.update(np.ascontiguousarray(part).view(np.uint8).reshape(-1).data)
        return digest.hexdigest()

    def placed(self, config: ModelConfig, family: ModelFamily, layer: int, group: LayerGroup) -> list[PlacedUpdate]:
        """The changes of one product of a layer, in the order of their outputs."""
        is_fused, placed, begin = family.layer.fused_matrices, list[PlacedUpdate](), 0
        for module in (_FUSED_MODULES if is_fused else _MODULES)[group]:
            update = self.updates.get(f"model.layers.{layer}.{module}")
            if update is not None:
                rotates_in_part = is_fused and group == "qkv" and config.effective_rotary_dim != config.head_dim
                placed.append(PlacedUpdate(begin, _rotated(update, config) if rotates_in_part else update))
            begin += _num_outputs(config, module)
        return placed


def modules_of(config: ModelConfig, family: ModelFamily) -> tuple[str, ...]:
    """The names of the modules that an adapter may change."""
    groups = (_FUSED_MODULES if family.layer.fused_matrices else _MODULES).items()
    experts = config.experts
    of_layers = (
        f"model.layers.{layer}.{module}"
        for layer in range(config.num_layers)
        for group, modules in groups
        for module in modules
        if group in ("qkv", "output") or experts is None or not experts.layers[layer]
    )
    return EMBEDDING, *of_layers, *([HEAD] if config.has_lm_head else [])


def check_shapes(
    name: str,
    module: str,
    down: Sequence[int],
    up: Sequence[int],
    shapes: WeightShapes,
    bias: Sequence[int] | None = None,
) -> None:
    """Checks the shapes of an update's tensors against those of a model's weights, before their numbers are read.

    Raises CorruptModel and InputError, which name the module.
    """
    if module == EMBEDDING and bias is not None:
        raise InputError(f"the adapter {name!r} has a bias at {module}; an embedding has none")
    if len(down) != 2 or len(up) != 2 or (bias is not None and list(bias) != [up[0]]):
        raise CorruptModel(f"the adapter {name!r} has tensors of {module} that are no matrices")
    expected = shapes.get(f"{module}.weight", shapes[f"{EMBEDDING}.weight"])  # a tied head has none of its own
    if module == EMBEDDING:
        expected = expected[1], expected[0]
    if expected != (up[0], down[1]):
        raise InputError(
            f"the adapter {name!r} is for another model: its {module} has {down[1]} inputs and {up[0]} "
            f"outputs, the model's has {expected[1]} and {expected[0]}"
        )
    if up[1] != down[0] or not 1 <= down[0] <= MAX_RANK:
        raise InputError(
            f"the adapter {name!r} has lora_A of rank {down[0]} and lora_B of rank {up[1]} at {module}; "
            f"they must be equal and at most {MAX_RANK}"
        )


def _num_outputs(config: ModelConfig, module: str) -> int:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes: dict[str, int] = {
        "self_attn.q_proj": queries,
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
        "mlp.gate_proj": config.intermediate_size,
    }
    return sizes.get(module, 0)  # 0: nothing follows it in its product


def _rotated(update: LowRankUpdate, config: ModelConfig) -> LowRankUpdate:
    """The update of a fused q, k and v, with rows in the order of `partial_rotary_permutation` as the model's."""
    rows = np.arange(len(update.up)).reshape(-1, config.head_dim)
    rotated = config.num_heads + config.num_kv_heads
    rows[:rotated] = rows[:rotated, partial_rotary_permutation(config.effective_rotary_dim, config.head_dim)]
    order = rows.reshape(-1)
    return LowRankUpdate(update.down, update.up[order], None if update.bias is None else update.bias[order])
