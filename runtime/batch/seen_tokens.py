"""The distinct tokens of a request's prompt and output, which the repetition penalty applies to."""

from __future__ import annotations

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

    def ids(self) -> npt.NDArray[np.int32]:
        """The token ids [N] int32, in no particular order. Valid until the next `add`."""
        return self._ids.view()
