"""Checks that a checkpoint has every tensor of the model in the right shape."""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.errors import CorruptModel
from plait.runtime.models.checkpoint_interface import WeightShapes


def check_shape(name: str, stored: Sequence[int] | None, expected: tuple[int, ...]) -> None:
    """Raises CorruptModel unless the stored shape is the expected one; None means that the tensor is missing."""
    if stored is None:
        raise CorruptModel(f"the checkpoint has no tensor {name!r}; download it again")
    if tuple(stored) != expected:
        raise CorruptModel(f"tensor {name!r} has the shape {tuple(stored)}, the config says {expected}")


def shape_of(name: str, shapes: WeightShapes) -> tuple[int, ...]:
    """The shape of the tensor. Raises CorruptModel if the model has no tensor of that name."""
    if name not in shapes:
        raise CorruptModel(f"the checkpoint has no tensor {name!r}")
    return shapes[name]
