"""The instructions that wait in a session behind its active call, with bounds on their size.

A client sends without waiting for replies, so these bounds are what keeps one session from filling the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from plait.runtime.messages import MAX_REPLACED, Append, Close, Fork, Generate, Select, SessionCall

MAX_WEIGHT = 1 << 18  # tokens of choices plus names of fork children plus one for each instruction


@dataclass(frozen=True)
class TextOverflow:
    """Replaces the first text in the queue that cannot fit the context, and all text after it.

    `num_tokens`: a lower bound of the session's length with that text.
    """

    num_tokens: int


Instruction = Append | SessionCall | Fork | Close | TextOverflow


class SessionQueue:
    """A FIFO queue of instructions.

    Text is limited to `max_text` tokens, what a session can hold; all other instructions to MAX_WEIGHT.
    """

    def __init__(self, max_text: int) -> None:
        self._max_text = max_text
        self._queue: OrderedDict[int, Instruction] = OrderedDict()  # by a serial number
        self._call_positions: dict[int, int] = {}  # call id -> serial number; the first if a client reuses an id
        self._num_put = 0
        self._num_text = self._weight = 0
        self._has_overflowed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, instruction: Instruction, min_length: int) -> bool:
        """Appends an instruction; returns False, without appending it, if the queue is full.

        `min_length`: tokens that the session's text has at least before the queued text. Text that cannot fit the
        context does not fill the queue: it is dropped, and a `TextOverflow` takes its place.
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
        """Removes and returns the first instruction."""
        return self._account_removed(self._queue.popitem(last=False)[1])

    def pop_call(
        self, call_id: int, replacement: Callable[[SessionCall], Append | None] = lambda call: None
    ) -> SessionCall | None:
        """Removes a call and returns it; None if none has that id. `replacement(call)`: the text that replaces it."""
        position = self._call_positions.get(call_id)
        if position is None:
            return None
        call = self._queue[position]
        assert isinstance(call, SessionCall)
        self._account_removed(call)
        text = replacement(call)
        if text is None:
            del self._queue[position]
        else:
            self._queue[position] = text
            self._num_text += len(text.token_ids)
            self._weight += 1
        return call

    def clear(self) -> list[Instruction]:
        """Removes and returns all instructions."""
        removed = list(self._queue.values())
        self._queue.clear()
        self._call_positions.clear()
        self._num_text = self._weight = 0
        return removed

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
    """Tokens of the text before it that a call may replace, within the bounds that are validated when it starts."""
    if isinstance(instruction, Generate):
        return MAX_REPLACED if instruction.plain_bytes and instruction.sampling.token_healing is not False else 0
    return min(max(0, instruction.replaced), MAX_REPLACED) if isinstance(instruction, Select) else 0


def _weight(instruction: Instruction) -> int:
    if isinstance(instruction, Select):
        return 1 + sum(map(len, instruction.choices))
    if isinstance(instruction, Fork):
        return 1 + len(instruction.children)
    return 0 if isinstance(instruction, TextOverflow) else 1
