"""Uploads of arrays to a torch device."""

from __future__ import annotations

import numpy as np
import torch

from plait.runtime.executor.torch_device import upload


def test_uploaded_arrays_are_aligned():
    arrays = [np.arange(n, dtype=np.int32) for n in (1, 0, 4, 7, 3)]
    uploaded = upload(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in uploaded] == [array.tolist() for array in arrays]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in uploaded if len(tensor))
