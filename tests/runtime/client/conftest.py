"""The echo scheduler for the tests of this folder."""

from __future__ import annotations

import pytest
from echo_scheduler import running_echo_scheduler


@pytest.fixture
def echo():
    with running_echo_scheduler() as scheduler:
        yield scheduler
