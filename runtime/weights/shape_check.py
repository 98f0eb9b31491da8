"""Which tensors a model must have, and the sentences for those that are not there or have another shape.

Knows: the family's shapes. Must not know: containers.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.errors import CorruptModel
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME
from plait.runtime.models.weight_shapes import model_shapes


def expected_shapes(config: ModelConfig) -> WeightShapes:
    """Name and shape of every tensor that a model of this config needs."""
    return model_shapes(config, FAMILIES_BY_NAME[config.architecture].layer_shapes)


def check_shape(name: str, found: Sequence[int] | None, expected: tuple[int, ...]) -> None:
    """CorruptModel unless the file has the tensor in the expected shape."""
    if found is None:
        raise CorruptModel(f"the checkpoint has no tensor {name!r}; download it again")
    if tuple(found) != expected:
        raise CorruptModel(f"tensor {name!r} has the shape {tuple(found)}, the config says {expected}")


def shape_of(name: str, shapes: WeightShapes) -> tuple[int, ...]:
    """The shape of a tensor that the model has; CorruptModel for another name."""
    if name not in shapes:
        raise CorruptModel(f"the checkpoint has no tensor {name!r}")
    return shapes[name]
