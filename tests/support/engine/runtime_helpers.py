"""Helpers for tests that run a runtime process."""

from __future__ import annotations

import time

from plait.runtime.sampling_params import sampling_params

LONG = sampling_params(max_tokens=4000, ignore_eos=True)


def open_session(runtime, text="Once upon a time"):
    """Returns a new session with `text`."""
    session = runtime.client.open_session()
    session.append(text)
    return session


def wait_until(condition, seconds):
    """Returns whether `condition()` becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
