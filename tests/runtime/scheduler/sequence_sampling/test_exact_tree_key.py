"""Exact requests share a tree of prefixes only if every parameter that changes the probabilities is equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.constrained import Choices
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.sampling_table import fields_of_stages
from plait.runtime.scheduler.sequence_sampling.exact_sampling import _tree_key

OTHER_VALUES: dict[type, Any] = {float: 0.5, int: 7, dict: {3: 1.0}}


def key(**fields: Any) -> Any:
    tokens = SimpleNamespace(view=lambda: np.arange(3))
    request: Any = SimpleNamespace(
        params=SamplingParams(**fields), seq=SimpleNamespace(tokens=tokens, namespace=("", ""))
    )
    return _tree_key(request, Choices(("a", "b")), 8)


@pytest.mark.parametrize("field", sorted({*fields_of_stages(SamplingParams, "logits", "filter", "draw")} - {"seed"}))
def test_another_value_of_a_sampling_parameter_is_another_tree(field: str) -> None:
    value = OTHER_VALUES.get(type(getattr(SamplingParams(), field)), True)
    assert hash(key(**{field: value})) and key(**{field: value}) != key()


def test_requests_that_differ_in_their_seed_share_a_tree() -> None:
    assert key(seed=1) == key(seed=2)
