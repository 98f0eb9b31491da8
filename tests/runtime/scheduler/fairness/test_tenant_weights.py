"""Tenants that always wait are served in the proportion of their weights."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.batch.request import Request, RequestOwner
from plait.runtime.config import engine_config
from plait.runtime.errors import InputError
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.scheduler import fairness


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=2), st.integers(1, 40))
def test_service_is_in_the_proportion_of_the_weights(weights, tokens) -> None:
    accounts, served, requests = fairness.Fairness("fair", weights), dict.fromkeys(weights, 0), []
    for name in weights:
        request = Request(RequestOwner(tenant=name, program_id=(b"", 0), priority=0), Sequence((name, "")), 0, 0)
        request.metrics.arrival_time = 0.0
        accounts.add(request)
        requests.append(request)
    for _ in range(3000):
        request = min(requests, key=lambda r: (accounts.rank(r, 0.0), r.arrival_index))
        accounts.charge(request, tokens, 0.0)
        served[request.owner.tenant] += tokens
    per_weight = [served[name] / weight for name, weight in weights.items()]
    assert max(per_weight) - min(per_weight) <= fairness.LEVEL_TOKENS + tokens


@pytest.mark.parametrize("weight", [0, -1, 1e9, "2"])
def test_weights_are_checked(weight) -> None:
    with pytest.raises(InputError):
        engine_config(tenant_weights={"a": weight})
