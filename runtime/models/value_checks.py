"""Numbers out of a model's file, each held against what any model could mean.

Knows: ranges and sentences. Must not know: files, or what the numbers are for.
"""

from __future__ import annotations

from typing import Any

from plait.runtime.errors import CorruptModel

# The largest value that any model could mean; what is larger is a damaged file.
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
    """The value, if it is a whole number from 1 to `maximum`; else CorruptModel."""
    if type(value) is not int or not 1 <= value <= maximum:
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must be a whole number from 1 to {maximum}")
    return value


def checked_float(name: str, value: Any, above: float, below: float) -> float:
    """The value, if it is a number between the two; else CorruptModel."""
    if type(value) not in (int, float) or not above < value < below:  # NaN fails the comparison
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must lie in {above:g} to {below:g}")
    return float(value)


def checked_bool(name: str, value: Any) -> bool:
    """The value, if it is true or false; else CorruptModel."""
    if type(value) is not bool:
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must be true or false")
    return value


def checked_floats(name: str, value: Any) -> tuple[float, ...]:
    """The values of a list of numbers; else CorruptModel."""
    if not isinstance(value, list):
        raise CorruptModel(f"the model's {name} is not a list of numbers")
    return tuple(checked_float(name, each, -1e30, 1e30) for each in value)
