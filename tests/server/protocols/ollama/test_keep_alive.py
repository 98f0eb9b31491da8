"""`keep_alive`: durations as Go reads them, in time linear in their length."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from plait.runtime.server.errors import ApiError
from plait.runtime.server.protocols.ollama.request import keep_alive_of


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        *((None, None), (-1, math.inf), (5, 5), (2.5, 2.5), ("5", 5), ("-1", math.inf), ("2.5", 2.5), ("5m", 300)),
        *(("1h30m", 5400), ("1.5h", 5400), ("100ms", 0.1), ("3µs2ns", 3.002e-6), ("-1m", math.inf), (1e300, math.inf)),
        *(("9" * 5000, math.inf), ("1.5m1.5s", 91.5)),
    ],
)
def test_durations_are_seconds(duration, seconds) -> None:
    expected = None if seconds is None else pytest.approx(seconds)
    assert keep_alive_of(duration, can_unload=False) == expected == keep_alive_of(duration, can_unload=True)


@pytest.mark.parametrize(
    "duration", ["", "soon", "m", "5x", "5m3", "1.h", "5 m", "--5m", "5m\n", 0, "0", "0s", "-0.0m"]
)
def test_other_texts_and_zero_are_refused(duration) -> None:
    with pytest.raises(ApiError) as caught:
        keep_alive_of(duration, can_unload=False)
    assert caught.value.param == "keep_alive"


@pytest.mark.parametrize("duration", [0, "0", "0s", "-0.0m", 0.0])
def test_zero_unloads_where_models_are_unloaded(duration) -> None:
    assert keep_alive_of(duration, can_unload=True) == 0


def test_a_duration_of_any_length_is_not_read() -> None:
    assert keep_alive_of("1" * 5000, can_unload=False) == math.inf
    with pytest.raises(ApiError, match="duration"):
        keep_alive_of("1" * 10_001, can_unload=False)


def test_a_long_text_does_not_stop_the_server() -> None:
    """Backtracking over digits once took twice as long for every further digit: a second for 22 of them."""
    code = (
        "from plait.runtime.server.errors import ApiError\n"
        "from plait.runtime.server.protocols.ollama.request import keep_alive_of\n"
        "for text in ('1' * 5000 + '!', '1m' * 5000 + '!', '1.1' * 5000, '0.' * 5000 + '!', '1' * 5000 + 'm' * 5000):\n"
        "    try:\n        keep_alive_of(text, True)\n"
        "    except ApiError:\n        print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["refused"] * 5
