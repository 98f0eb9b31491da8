"""What waits in a session behind the call it is in: instructions in order, and bounds on what they may hold.

A client sends without waiting, so nothing but this file keeps one session from filling the scheduler's memory.

Knows: instructions and their weights. Must not know: how instructions are carried out, replies.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from plait.runtime.messages import MAX_REPLACED, Append, Close, Fork, Select, SessionCall

MAX_WEIGHT = 1 << 18  # tokens of choices and names of children, and one for each instruction


@dataclass(frozen=True)
class TextOverflow:
    """Stands in the queue for text that can no longer fit, and for all text behind it: at least `num_tokens` tokens."""

    num_tokens: int


Instruction = Append | SessionCall | Fork | Close | TextOverflow


class SessionQueue:
    """A queue of instructions. Text counts against the `max_text` tokens that a session can hold, the rest apart."""

    def __init__(self, max_text: int) -> None:
        self._max_text = max_text
        self._queue: OrderedDict[int, Instruction] = OrderedDict()  # by a number that counts up
        self._call_positions: dict[int, int] = {}  # of calls: of two with one number, which no client sends, the first
        self._num_put = 0
        self._num_text = self._weight = 0
        self._has_overflowed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, instruction: Instruction, min_length: int) -> bool:
        """Adds it behind a text of at least `min_length` tokens. False, and nothing added, where the queue is full.

        Text never fills it: what could not fit the context is dropped, and a `TextOverflow` stands there in its place.
        """
        if isinstance(instruction, Append):
            return self._put_text(instruction, min_length)
        weight = _weight(instruction)
        if self._weight + weight > MAX_WEIGHT and not isinstance(instruction, Close):
            return False
        self._num_text -= _num_replaced(instruction)
        if not (isinstance(instruction, Close) and isinstance(next(reversed(self._queue.values()), None), Close)):
            self._append(instruction)
            self._weight += weight
        return True

    def pop(self) -> Instruction:
        """The first of them."""
        return self._account_removed(self._queue.popitem(last=False)[1])

    def pop_call(self, call_id: int) -> bool:
        """Takes out a call; False when there is none with that number."""
        place = self._call_positions.get(call_id)
        if place is None:
            return False
        self._account_removed(self._queue.pop(place))
        return True

    def clear(self) -> list[Instruction]:
        """Takes them all."""
        taken = list(self._queue.values())
        self._queue.clear()
        self._call_positions.clear()
        self._num_text = self._weight = 0
        return taken

    def _append(self, instruction: Instruction) -> None:
        self._num_put += 1
        self._queue[self._num_put] = instruction
        if isinstance(instruction, SessionCall):
            self._call_positions.setdefault(instruction.call, self._num_put)

    def _put_text(self, instruction: Append, min_length: int) -> bool:
        count = len(instruction.token_ids)
        if self._has_overflowed or not count:
            return True
        if min_length + self._num_text + count > self._max_text:
            self._has_overflowed = True
            self._append(TextOverflow(min_length + self._num_text + count))
            return True
        if self._weight >= MAX_WEIGHT:
            return False
        self._append(instruction)
        self._num_text += count
        self._weight += 1
        return True

    def _account_removed(self, instruction: Instruction) -> Instruction:
        if isinstance(instruction, Append):
            self._num_text -= len(instruction.token_ids)
            self._weight -= 1
        else:
            self._weight -= _weight(instruction)
            self._num_text += _num_replaced(instruction)
        if isinstance(instruction, SessionCall):
            self._call_positions.pop(instruction.call, None)
        return instruction


def _num_replaced(instruction: Instruction) -> int:
    """Tokens of the text before it that an instruction may take back: one of another number is refused in its turn."""
    return min(max(0, instruction.replaced), MAX_REPLACED) if isinstance(instruction, Select) else 0


def _weight(instruction: Instruction) -> int:
    if isinstance(instruction, Select):
        return 1 + sum(map(len, instruction.choices))
    if isinstance(instruction, Fork):
        return 1 + len(instruction.children)
    return 0 if isinstance(instruction, TextOverflow) else 1
