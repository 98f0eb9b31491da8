"""How tensor parallelism divides a model: the config of one rank, and the part of every weight that it holds.

Heads, the width of the MLP and of experts, and the vocabulary are divided. A matrix that makes one of them is split by
its outputs (column-parallel), the matrix behind it by its inputs (row-parallel); the sum over all ranks follows.
Routers are not split, and of the norms only those over several heads. The rules go by the names of modules, so a family
whose modules have these names needs no others. `WeightSplit` compares all shapes with those of the rank's config, and
refuses a family that the rules do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from plait.runtime.errors import InputError
from plait.runtime.models.checkpoint_interface import Range, WeightPart, WeightShapes
from plait.runtime.models.config import ModelConfig

Divided = Literal["queries", "keys", "mlp", "experts"]
# Column-parallel: what each block of a module's outputs is.
OUTPUTS: Mapping[str, tuple[Divided, ...]] = {
    "self_attn.q_proj": ("queries",),
    "self_attn.k_proj": ("keys",),
    "self_attn.v_proj": ("keys",),
    "self_attn.qkv_proj": ("queries", "keys", "keys"),
    "mlp.gate_proj": ("mlp",),
    "mlp.up_proj": ("mlp",),
    "mlp.gate_up_proj": ("mlp", "mlp"),
    "mlp.experts.gate_proj": ("experts",),
    "mlp.experts.up_proj": ("experts",),
}
# Row-parallel: split along the module's inputs. Rank 0 alone adds its bias.
INPUTS: Mapping[str, Divided] = {
    "self_attn.o_proj": "queries",
    "mlp.down_proj": "mlp",
    "mlp.experts.down_proj": "experts",
}
# Norms over all heads together are split like the heads; those of each head, [D], are not split.
JOINT_NORMS: Mapping[str, Divided] = {"self_attn.q_norm": "queries", "self_attn.k_norm": "keys"}
VOCABULARY = ("model.embed_tokens", "lm_head")


@dataclass(frozen=True)
class Rank:
    """The rank `index` of `size` ranks."""

    index: int
    size: int


def check_divisible(config: ModelConfig, size: int) -> None:
    """Raises InputError, which names the sizes, for a model that `size` ranks cannot divide."""
    if config.num_heads % size:
        raise _not_divisible(size, f"{config.num_heads} attention heads", config.num_heads)
    groups = config.num_kv_heads
    if groups % size and size % groups:
        raise InputError(
            f"tensor_parallel_size={size}: the model's {groups} KV heads can neither be divided among {size} ranks "
            "nor replicated equally"
        )
    has_mlp = config.experts is None or not all(config.experts.layers)
    if has_mlp and config.intermediate_size % size:
        raise _not_divisible(size, f"MLP of width {config.intermediate_size}", config.intermediate_size)
    if config.experts is not None and config.experts.intermediate_size % size:
        width = config.experts.intermediate_size
        raise _not_divisible(size, f"experts of width {width}", width)
    if config.vocab_size <= (size - 1) * -(-config.vocab_size // size):
        raise InputError(f"tensor_parallel_size={size}: a vocabulary of {config.vocab_size} tokens is too small")


def _not_divisible(size: int, what: str, number: int) -> InputError:
    possible = ", ".join(str(other) for other in range(1, min(number, 64) + 1) if number % other == 0)
    return InputError(
        f"tensor_parallel_size={size}: the model's {what} cannot be divided among {size} ranks; {possible} divide them"
    )


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The config of one rank: its heads, and its part of the width of the MLP. Raises InputError.

    Vocabulary and hidden size are those of the model.
    """
    check_divisible(config, size)
    experts = config.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=max(1, config.intermediate_size // size),
        experts=experts,
    )


def vocabulary_range(vocab_size: int, rank: Rank) -> Range:
    """The token ids whose embeddings and logits the rank computes; the last rank may have fewer."""
    part = -(-vocab_size // rank.size)
    return min(vocab_size, rank.index * part), min(vocab_size, (rank.index + 1) * part)


class WeightSplit:
    """The parts of all weights that one rank holds.

    full, local: names and shapes of the weights by the model's config and by that of the rank. Raises InputError for a
    family with a weight for which there is no rule.
    """

    def __init__(self, config: ModelConfig, rank: Rank, full: WeightShapes, local: WeightShapes) -> None:
        self._config, self._rank = config, rank
        self.parts = {name: self._part(name, shape) for name, shape in full.items()}
        for name, part in self.parts.items():
            is_vocabulary = name.removesuffix(".weight") in VOCABULARY
            if not is_vocabulary and part.shape(full[name]) != local.get(name):
                raise InputError(
                    f"tensor parallelism has no rule for {name!r} of the family {config.architecture}; "
                    "run it without tensor_parallel_size"
                )

    def _part(self, name: str, shape: tuple[int, ...]) -> WeightPart:
        module, _, kind = name.rpartition(".")
        if module in VOCABULARY:
            return WeightPart(outputs=(vocabulary_range(self._config.vocab_size, self._rank),))
        layer_module = module.removeprefix("model.layers.").partition(".")[2]
        if layer_module in OUTPUTS:
            return WeightPart(outputs=self._outputs(OUTPUTS[layer_module]))
        if layer_module in JOINT_NORMS and shape != (self._config.head_dim,):
            return WeightPart(outputs=self._outputs((JOINT_NORMS[layer_module],)))
        if layer_module in INPUTS:
            if kind == "bias":
                return WeightPart(is_zero=self._rank.index > 0)
            return WeightPart(inputs=self._range(INPUTS[layer_module])[0])
        return WeightPart()

    def _outputs(self, blocks: tuple[Divided, ...]) -> tuple[Range, ...]:
        """The rank's range of each block of outputs, by its place in the matrix."""
        ranges, start = [], 0
        for block in blocks:
            (begin, end), width = self._range(block)
            ranges.append((start + begin, start + end))
            start += width
        return tuple(ranges)

    def _range(self, divided: Divided) -> tuple[Range, int]:
        """The rank's range of what is divided, and the complete width."""
        config, rank, size = self._config, self._rank.index, self._rank.size
        if divided == "keys":
            heads = max(1, config.num_kv_heads // size)
            first = rank * config.num_kv_heads // size  # with fewer heads than ranks, several ranks have the same one
            return (first * config.head_dim, (first + heads) * config.head_dim), config.num_kv_heads * config.head_dim
        width = {
            "queries": config.num_heads * config.head_dim,
            "mlp": config.intermediate_size,
            "experts": config.experts.intermediate_size if config.experts is not None else 0,
        }[divided]
        return (rank * width // size, (rank + 1) * width // size), width
