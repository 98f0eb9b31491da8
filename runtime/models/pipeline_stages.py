"""How pipeline parallelism divides a model: the consecutive layers of each stage.

The first stage has the embedding too, the last one the final norm and the output head. A head that is tied to the
embedding is in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.weight_shapes import expected_shapes


@dataclass(frozen=True)
class Stage:
    """The layers `first` to `end - 1` of a model of `num_layers` layers."""

    first: int
    end: int
    num_layers: int

    @property
    def layers(self) -> range:
        return range(self.first, self.end)

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the final norm and the output head."""
        return self.end == self.num_layers


def split_layers(config: ModelConfig, size: int) -> tuple[Stage, ...]:
    """The stages of `size`, of as equal numbers of weights as possible.

    config: of the complete model, so that the ranks of a stage agree. Raises InputError for more stages than layers.
    """
    if size > config.num_layers:
        layers = "1 layer" if config.num_layers == 1 else f"{config.num_layers} layers"
        raise InputError(f"pipeline_parallel_size={size}: the model has {layers}, and every stage needs at least one")
    ends = _even_ends(layer_weights(config), size)
    firsts = [0, *ends[:-1]]
    return tuple(Stage(first, end, config.num_layers) for first, end in zip(firsts, ends, strict=True))


def layer_weights(config: ModelConfig) -> list[int]:
    """The number of weights of every layer; the embedding counts to the first, norm and head to the last."""
    counts = [0] * config.num_layers
    for name, shape in expected_shapes(config).items():
        number = name.removeprefix("model.layers.").partition(".")[0]
        index = int(number) if number.isdecimal() else 0 if name.startswith("model.embed_tokens.") else -1
        counts[index] += math.prod(shape)
    if config.tie_word_embeddings:
        counts[-1] += config.vocab_size * config.hidden_size
    return counts


def _even_ends(counts: Sequence[int], size: int) -> list[int]:
    """The ends of `size` consecutive parts, none of them empty, whose sums have the smallest sum of squares."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    # costs[end]: the least cost of the items before `end` in as many parts as were added; ends[...]: how.
    costs: dict[int, tuple[int, list[int]]] = {end: (sums[end] ** 2, [end]) for end in range(1, len(sums))}
    for num_parts in range(2, size + 1):
        costs = {
            end: min(
                (costs[begin][0] + (sums[end] - sums[begin]) ** 2, [*costs[begin][1], end])
                for begin in range(num_parts - 1, end)
            )
            for end in range(num_parts, len(sums))
        }
    return costs[len(counts)][1]
