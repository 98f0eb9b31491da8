"""Token healing of a request: its last prompt tokens were removed, and are sampled again with what follows them.

prompt   see |  http | :        ":" is removed
output   ://  | www             the first token consists of ":" and the beginning of the value "//www"
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Healing:
    """The state while the text of the removed tokens is sampled again.

    start: length of the sequence without the tokens `removed`. remaining: bytes that are still to be sampled.
    """

    start: int
    removed: list[int]
    remaining: bytes


@dataclass(frozen=True)
class BorderToken:
    """The first output token, if it begins with the end of the prompt, the bytes `head`.

    value_tokens: tokens with the text of its other bytes, of which there are `num_value_bytes`.
    """

    head: bytes
    value_tokens: list[int]
    num_value_bytes: int
