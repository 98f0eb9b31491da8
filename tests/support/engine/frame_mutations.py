"""Mutations of frames: of their bytes, and of the values that they encode."""

from __future__ import annotations

import math
import random

import msgspec

_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode
KINDS = ["Hello", "Open", "Append", "Generate", "Select", "Embed", "Fork", "Close", "Abort", "Inspect", "FlushCache"]
KINDS += ["Welcome", "Tokens", "Finished", "Failed", "Status", "", "Nothing"]
VALUES = [None, True, False, 0, 1, 2, 3, 63, 64, 255, -1, -2, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63]
VALUES += [2**64 - 1, -(2**31), -(2**63), 0.0, 0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf]
VALUES += ["", "a", "\x00", "é" * 100, "\U0010ffff", "x" * 300, "(", "(a*)*b", "a{99999}", b"", b"\xff" * 10]
VALUES += [
    [],
    [[]],
    [[], []],
    {},
    {"a": 1},
    {1: 2},
    {"type": "regex", "pattern": "("},
    {"type": "choices", "choices": []},
]
LARGE_VALUES = [[0] * 5000, list(range(3000)), "y" * 1_000_000, [[1, 2, 3]] * 1024, "[" * 5000]
LENGTHS = [b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
LENGTHS += [
    b"\xdd\x10\x00\x00\x00",
    b"\xd9\xff",
    b"\xa2\xff\xfe",
    b"\xc1",
    b"\xc7\x03\xff",
    b"\xd6\xff\x00\x00\x00\x00",
]


class FrameMutator:
    """Mutates frames of a corpus, the same way for the same seed."""

    def __init__(self, seed: int, corpus: list[bytes]) -> None:
        self.random, self.corpus = random.Random(seed), corpus

    def mutate(self, frame: bytes) -> bytes:
        """Returns the frame after one to three mutations."""
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            frame = self.random.choice(MUTATIONS)(self, frame)
        return frame

    # -- bytes ----------------------------------------------------------------------------------------

    def _place(self, frame: bytes) -> int:
        return self.random.randrange(len(frame) + 1)

    def flip_bits(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self.random.randint(1, 6) if frame else 0):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def truncate(self, frame: bytes) -> bytes:
        return frame[: self._place(frame)]

    def splice(self, frame: bytes) -> bytes:
        other = self.random.choice(self.corpus)
        return frame[: self._place(frame)] + other[self._place(other) :]

    def remove_bytes(self, frame: bytes) -> bytes:
        start = self._place(frame)
        return frame[:start] + frame[start + self.random.randint(1, 8) :]

    def insert_bytes(self, frame: bytes) -> bytes:
        start = self._place(frame)
        return frame[:start] + self.random.randbytes(self.random.randint(1, 8)) + frame[start:]

    def claim_length(self, frame: bytes) -> bytes:
        """Puts a length, an invalid type or text that is not UTF-8 over some bytes."""
        start, claim = self._place(frame), self.random.choice(LENGTHS)
        return frame[:start] + claim + frame[start + self.random.randint(0, len(claim)) :]

    def break_text(self, frame: bytes) -> bytes:
        """Makes a letter an invalid byte."""
        letters = [i for i, byte in enumerate(frame) if 0x61 <= byte <= 0x7A]
        if not letters:
            return frame
        place = self.random.choice(letters)
        return frame[:place] + self.random.choice([b"\xff", b"\x80", b"\xed"]) + frame[place + 1 :]

    def nest(self, frame: bytes) -> bytes:
        start = self._place(frame)
        return (
            frame[:start]
            + self.random.choice([b"\x91", b"\x81\x01"]) * self.random.choice([10, 600, 20_000])
            + frame[start:]
        )

    # -- values ---------------------------------------------------------------------------------------

    def change_value(self, frame: bytes) -> bytes:
        """Replaces, removes, doubles or moves one value of the frame."""
        try:
            root = _decode(frame)
            _encode(root)  # raises RecursionError for less depth than decoding does
        except Exception:
            return self.flip_bits(frame)
        places = _places(root)
        if not places:
            return frame
        container, key = self.random.choice(places)
        action = self.random.randrange(6)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, list):
            container.insert(key, container[key])
        elif action == 2:
            other, other_key = self.random.choice(places)
            container[key] = msgspec.msgpack.decode(_encode(other[other_key]))
        elif action == 3:
            container[key] = self.random.choice(KINDS)
        elif action == 4 and self.random.random() < 0.02:
            container[key] = self.random.choice(LARGE_VALUES)
        else:
            container[key] = self.random.choice(VALUES)
        try:
            return _encode(root) if self.random.random() < 0.3 or not isinstance(root, list) else _frame(root)
        except RecursionError:  # a copy of an outer value within an inner one
            return frame


def _frame(messages: list) -> bytes:
    """With the header of `build_frame`."""
    return b"\xdd" + len(messages).to_bytes(4, "big") + b"".join(map(_encode, messages))


def _places(root: object) -> list[tuple]:
    """Every (container, key) of a value."""
    places, stack = [], [root]
    while stack:
        value = stack.pop()
        items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
        for key, child in items:
            places.append((value, key))
            stack.append(child)
    return places


MUTATIONS = [FrameMutator.flip_bits, FrameMutator.truncate, FrameMutator.splice, FrameMutator.remove_bytes,
             FrameMutator.insert_bytes, FrameMutator.claim_length, FrameMutator.break_text, FrameMutator.nest,
             *[FrameMutator.change_value] * 10]  # fmt: skip
