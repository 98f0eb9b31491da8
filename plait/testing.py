"""Backends for the tests of programs, without a model: answers from a script, and calls recorded and played again.

The public names, each listed once; see docs/testing.md. Loaded only where it is imported.
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
