"""Whether the packed CPU decoder can run on this machine, for messages. Imports no torch."""

from __future__ import annotations


def describe_packed_weights(device_type: str) -> str:
    """Describes the packed CPU decoder on a device ("cpu", "cuda", ...). Models that it runs use no torch operators."""
    if device_type != "cpu":
        return "none: they are for CPUs"
    try:
        from plait.kernels.cpu.decoder import instruction_set, missing_features
    except ImportError as error:
        return f"none: llvmlite cannot be imported ({error})"
    if missing := missing_features():
        return f"none: this CPU has no {', '.join(missing)}"
    return f"LLVM, {instruction_set()}, a step is one call"
