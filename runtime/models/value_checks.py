"""Range checks of the values in model files. All raise CorruptModel."""

from __future__ import annotations

from typing import Any

from plait.runtime.errors import CorruptModel

# Upper limits far above any real model: a larger value means a damaged file.
MAX_VALUES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_layers": 2**12,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**12,
    "intermediate_size": 2**24,
    "context_length": 2**30,
    "num_experts": 2**12,
}


def checked_int(name: str, value: Any, maximum: int) -> int:
    """Returns the value if it is an int from 1 to `maximum`."""
    if type(value) is not int or not 1 <= value <= maximum:
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must be a whole number from 1 to {maximum}")
    return value


def checked_float(name: str, value: Any, above: float, below: float) -> float:
    """Returns the value if it lies between `above` and `below`, both excluded."""
    if type(value) not in (int, float) or not above < value < below:  # NaN fails the comparison
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must lie between {above:g} and {below:g}")
    return float(value)


def checked_bool(name: str, value: Any) -> bool:
    """Returns the value if it is a bool."""
    if type(value) is not bool:
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must be true or false")
    return value


def checked_floats(name: str, value: Any) -> tuple[float, ...]:
    """Returns the values of a list of finite numbers."""
    if not isinstance(value, list):
        raise CorruptModel(f"the model's {name} is not a list of numbers")
    return tuple(checked_float(name, number, -1e30, 1e30) for number in value)
