"""`keep_alive`: durations as Go reads them, in time linear in their length."""

from __future__ import annotations

import subprocess
import sys

import pytest

from plait.runtime.server.errors import ApiError
from plait.runtime.server.protocols.ollama.request import check_keep_alive


@pytest.mark.parametrize(
    "duration", [None, -1, 5, 2.5, "5", "-1", "2.5", "5m", "1h30m", "1.5h", "100ms", "3µs2ns", "-1m"]
)
def test_durations_are_accepted(duration) -> None:
    check_keep_alive(duration)


@pytest.mark.parametrize(
    "duration", ["", "soon", "m", "5x", "5m3", "1.h", "5 m", "--5m", "5m\n", 0, "0", "0s", "-0.0m"]
)
def test_other_texts_and_zero_are_refused(duration) -> None:
    with pytest.raises(ApiError) as caught:
        check_keep_alive(duration)
    assert caught.value.param == "keep_alive"


def test_a_long_text_does_not_stop_the_server() -> None:
    """Backtracking over digits once took twice as long for every further digit: a second for 22 of them."""
    code = (
        "from plait.runtime.server.errors import ApiError\n"
        "from plait.runtime.server.protocols.ollama.request import check_keep_alive\n"
        "for text in ('1' * 5000 + '!', '1m' * 5000 + '!', '1.1' * 5000, '0.' * 5000 + '!', '1' * 5000 + 'm' * 5000):\n"
        "    try:\n        check_keep_alive(text)\n"
        "    except ApiError:\n        print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["refused"] * 5
