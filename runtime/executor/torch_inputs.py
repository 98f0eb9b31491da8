"""A batch's arrays on a torch device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from plait.kernels.layout import AttentionLayout, SharedPrefixes
from plait.runtime.arrays import IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.executor.batch_arrays import BatchArrays, batch_arrays
from plait.runtime.executor.torch_device import upload
from plait.runtime.models.layers import StepUpdates


class ForwardInputs(NamedTuple):
    """One batch on the device, all int32."""

    token_ids: torch.Tensor  # [T]; negative ids are placeholders, see ScheduledRequest
    output_indices: torch.Tensor  # the tokens whose hidden states are returned
    layout: AttentionLayout
    updates: StepUpdates | None = None  # of the adapters of the batch's rows


def upload_inputs(batch: Batch, device: torch.device, shared: Sequence[IntArray] = ()) -> ForwardInputs:
    """Starts copying the batch's arrays to the device. `shared`: the arrays of its shared prefixes, if it has any."""
    return upload_arrays(batch_arrays(batch), device, shared)


def upload_arrays(arrays: BatchArrays, device: torch.device, shared: Sequence[IntArray] = ()) -> ForwardInputs:
    """`upload_inputs` of a batch's arrays."""
    counts = np.diff(arrays.q_starts)
    token_ids, output_indices, q_starts, kv_starts, kv_pages, positions, write_slots, *shared_tensors = upload(
        [*arrays, *shared], device
    )
    layout = AttentionLayout(
        q_starts,
        kv_starts,
        kv_pages,
        positions,
        write_slots,
        min_q_len=int(counts.min()),
        max_q_len=int(counts.max()),
        shared=SharedPrefixes(*shared_tensors) if shared_tensors else None,
    )
    return ForwardInputs(token_ids, output_indices, layout)
