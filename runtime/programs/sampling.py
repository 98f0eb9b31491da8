"""The sampling options of one gen of a program: its own, over the defaults of the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.constrained.specs import Reasoning, Spec

_OF_CONSTRAINED_GENS = ("exact", "particles")


def gen_fields(given: Mapping[str, Any], defaults: Mapping[str, Any], constraint: Spec | None) -> dict[str, Any]:
    """Fields of `SamplingParams` for a gen. `exact` and `particles`, as defaults, are for constrained gens alone: free
    text, with a value behind it or without, is sampled as ever.

    >>> gen_fields({"seed": 1}, {"seed": 2, "exact": True, "stop": ("x",)}, None)
    {'seed': 1, 'stop': ('x',)}
    """
    fields = {**defaults, **given}
    if constraint is None or isinstance(constraint, Reasoning):
        for name in _OF_CONSTRAINED_GENS:
            if name in defaults and name not in given:
                del fields[name]
    return fields
