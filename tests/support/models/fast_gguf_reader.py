"""The reader of the gguf package, the reference for plait's reader, made three times faster.

The original slices a memmap for every string of a vocabulary, and each slice is an object of numpy's subclass. This one
slices a plain array over the same pages.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np


class Reader(gguf.GGUFReader):
    @property
    def data(self) -> np.ndarray[Any, Any]:
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        self._plain = np.asarray(mapped)
