"""The state of a request whose last prompt tokens were taken back, to be sampled again with what follows them.

prompt   see |  http | :        ":" is taken back
output   ://  | www             the first token spells ":" and begins the value "//www"
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Healing:
    """Runs until the text that was taken back is spelled.

    start: length of the sequence without the tokens `taken`. left: bytes that are still to be spelled.
    """

    start: int
    taken: list[int]
    left: bytes


@dataclass(frozen=True)
class BorderToken:
    """The first output token, where it also spells the end of the prompt: `head`, and then the tokens of the value."""

    head: bytes
    value_tokens: list[int]
    num_value_bytes: int
