"""Torch devices: which one to use, what it supports, its memory budget, and copying arrays to it."""

from __future__ import annotations

import os

import torch

from plait.runtime.arrays import IntArray
from plait.runtime.errors import InputError
from plait.runtime.executor.batch_arrays import starts
from plait.runtime.executor.host_machine import host_kv_cache_budget

UPLOAD_ALIGN_BYTES = 16  # Triton compiles a kernel again for each mixture of aligned and unaligned pointers
INT32_BYTES = 4
GPU_KV_CACHE_FRACTION = 0.85  # of a GPU's free memory, at most; see `gpu.kv_pool_size`


def choose_device(name: str) -> torch.device:
    """Returns the torch device `name`. "auto" is CUDA if available, else the CPU. InputError if it cannot be used.

    A CUDA device becomes this thread's current one; see `use_device`.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=device)
        use_device(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"device {name!r} cannot be used here ({reason}); `plait check` shows what can") from None
    return device


def describe_device(device: torch.device) -> str:
    """The device with the name of the GPU, or the threads and the instructions that torch uses on the CPU."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{device} ({torch.get_num_threads()} threads of {os.cpu_count()} processors, {instructions})"


def use_device(device: torch.device) -> None:
    """Makes a CUDA device the current one of this thread. Call it in every thread that launches work on the device.

    Triton and CUDA graphs launch on the thread's current device, whatever the device of their tensors; it is 0 in a new
    thread.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_kv_cache_budget(device: torch.device) -> int:
    """The most bytes of a KV cache before a trial: 85% of a GPU's free memory; on a host `host_kv_cache_budget`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that loading the model released is free too
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * GPU_KV_CACHE_FRACTION)
    return host_kv_cache_budget()


def upload(arrays: list[IntArray], device: torch.device) -> list[torch.Tensor]:
    """Copies int32 arrays to the device in one transfer that the host does not wait for.

    Each tensor begins at a multiple of UPLOAD_ALIGN_BYTES.
    """
    align = UPLOAD_ALIGN_BYTES // INT32_BYTES
    offsets = starts([-(-len(array) // align) * align for array in arrays])
    buffer = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for offset, array in zip(offsets, arrays, strict=False):
        host[offset : offset + len(array)] = array
    uploaded = buffer.to(device, non_blocking=True)
    return [uploaded[offset : offset + len(array)] for offset, array in zip(offsets.tolist(), arrays, strict=False)]
