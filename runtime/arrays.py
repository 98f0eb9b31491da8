"""Types of the NumPy arrays that pass between parts of the runtime."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]  # token ids, page numbers, packed masks
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
