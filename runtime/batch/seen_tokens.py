"""The distinct tokens of a text, or of its last tokens: what the repetition penalty applies to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.runtime.arrays import IntArray
from plait.runtime.kv_cache.sequence import IntBuffer


class SeenTokens:
    """A set of token ids that only grows. `ids` costs nothing per step, however long the prompt is.

    >>> seen = SeenTokens([7, 3, 7])
    >>> seen.add(3), seen.add(5), seen.ids().tolist()
    (None, None, [3, 7, 5])
    """

    def __init__(self, prompt: IntArray | list[int]) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int32))
        self._ids = IntBuffer(distinct)
        self._members = set(distinct.tolist())

    def add(self, token: int) -> None:
        """Adds a token of the output."""
        if token not in self._members:
            self._members.add(token)
            self._ids.append(token)

    def ids(self, ahead: Sequence[int] = ()) -> npt.NDArray[np.int32]:
        """The token ids [N] int32, in no particular order, if the text went on with `ahead`.

        Valid until the next `add`.
        """
        new = [token for token in dict.fromkeys(ahead) if token not in self._members]
        return np.append(self._ids.view(), np.array(new, dtype=np.int32)) if new else self._ids.view()


class RecentTokens:
    """The set of the last `count` token ids of a text that grows. `ids` costs time in proportion to `count`.

    >>> recent = RecentTokens([7, 3, 7, 5], 2)
    >>> recent.add(5), recent.ids().tolist()
    (None, [5])
    """

    def __init__(self, prompt: IntArray | list[int], count: int) -> None:
        self._last = deque(np.asarray(prompt[-count:], dtype=np.int32).tolist(), maxlen=count)

    def add(self, token: int) -> None:
        """Adds the next token of the text."""
        self._last.append(token)

    def ids(self, ahead: Sequence[int] = ()) -> npt.NDArray[np.int32]:
        """The token ids [N] int32, rising, if the text went on with `ahead`."""
        last = deque([*self._last, *ahead], maxlen=self._last.maxlen) if ahead else self._last
        return np.array(sorted(set(last)), dtype=np.int32)
