"""Which products attention uses: the values of `isa`, and the choice among them."""

from __future__ import annotations

from plait.kernels.cpu import amx
from plait.kernels.cpu.attention.products.int8_vnni_kernel import HAS_VNNI
from plait.kernels.cpu.llvm import HAS_BF16_DOT

F32, AVX512_BF16, AMX, INT8_VNNI = range(4)  # each is a `*_kernel` module


def best_isa(has_int8_cache: bool) -> int:
    """Returns the quickest products of this CPU. AMX widens an int8 cache to bfloat16."""
    if amx.available():
        return AMX
    if has_int8_cache and HAS_VNNI:
        return INT8_VNNI
    return AVX512_BF16 if HAS_BF16_DOT else F32
