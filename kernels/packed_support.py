"""Whether the packed CPU decoder can run on this machine, for messages. Imports no torch."""

from __future__ import annotations


def packed_unsupported_reason() -> str | None:
    """The reason why no packed decoder runs on this machine's CPU; None if one does."""
    try:
        from plait.kernels.cpu.decoder import missing_features
    except ImportError as error:
        return f"llvmlite cannot be imported ({error})"
    missing = missing_features()
    return f"this CPU has no {', '.join(missing)}" if missing else None


def describe_packed_weights(device_type: str) -> str:
    """Describes the packed CPU decoder on a device ("cpu", "cuda", ...). Models that it runs use no torch operators."""
    reason = "they are for CPUs" if device_type != "cpu" else packed_unsupported_reason()
    if reason is not None:
        return f"none: {reason}"
    from plait.kernels.cpu.decoder import instruction_set

    return f"LLVM, {instruction_set()}, a step is one call"
