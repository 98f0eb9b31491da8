"""Backends for testing programs without a model: scripted answers, and recorded calls that are replayed.

These are the public names; see docs/testing.md.
"""

from __future__ import annotations

from plait.lang.testing.recording import Recording
from plait.lang.testing.replay import Replay, ReplayMismatch, recorded
from plait.lang.testing.script_answers import Answer, ScriptError, call
from plait.lang.testing.scripted import Scripted, always
from plait.lang.testing.text_client import Asked

__all__ = [
    "Answer",
    "Asked",
    "Recording",
    "Replay",
    "ReplayMismatch",
    "ScriptError",
    "Scripted",
    "always",
    "call",
    "recorded",
]
