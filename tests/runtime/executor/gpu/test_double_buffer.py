"""Double buffers for the inputs of a step."""

from __future__ import annotations

import torch
from engine_runs import CPU
from synchronous_stream import ImmediateStream

from plait.runtime.executor.gpu.double_buffer import DoubleBuffer


def test_a_double_buffer_uploads_to_fixed_addresses():
    fields = {"a": (torch.int32, 3), "b": (torch.int64, 2), "c": (torch.float32, 5)}
    buffer = DoubleBuffer(fields, ImmediateStream(CPU))
    addresses = {name: tensor.data_ptr() for name, tensor in buffer.device.items()}
    for value in (1, -7):
        buffer.begin()
        for array in buffer.host.values():
            array[:] = value
        buffer.upload()
        assert all(tensor.tolist() == [value] * len(tensor) for tensor in buffer.device.values())
    assert addresses == {name: tensor.data_ptr() for name, tensor in buffer.device.items()}
    assert all(address % 8 == 0 for address in addresses.values())
