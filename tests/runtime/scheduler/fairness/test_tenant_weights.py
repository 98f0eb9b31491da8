"""The weights of tenants; test_tenants.py and tests/constrained/test_tenant_shares.py show their effect."""

from __future__ import annotations

import pytest

from plait.runtime.config import engine_config
from plait.runtime.errors import InputError


@pytest.mark.parametrize("weight", [0, -1, 1e9, "2"])
def test_weights_are_checked(weight) -> None:
    with pytest.raises(InputError):
        engine_config(tenant_weights={"a": weight})
