"""The CPU features that kernels are compiled for: this CPU's own, or those of a smaller instruction set.

PLAIT_ISA=avx2      as on a CPU with AVX2 only
"""

from __future__ import annotations

import os

import llvmlite.binding

# name -> LLVM's name of a CPU and its features; only LLVM knows which others a CPU's name implies
ISAS = {"avx2": ("x86-64-v3", "+avx,+avx2,+fma,+f16c")}
# feature -> prefixes of the features that LLVM drops if it is missing
DEPENDENT_FEATURES = {"avx": ("avx", "fma", "f16c"), "avx2": ("avx512", "avxvnni"), "avx512f": ("avx512", "amx-avx512")}


def parse_features(listed: str) -> frozenset[str]:
    """Returns the features that a compiler may use of those written as "+avx2,-avx512f"."""
    on = {part[1:] for part in listed.split(",") if part.startswith("+")}
    for feature, others in DEPENDENT_FEATURES.items():
        if feature not in on:
            on = {name for name in on if not name.startswith(others)}
    return frozenset(on)


def compile_target() -> tuple[str, str]:
    """Returns the CPU and the features that LLVM compiles for, on which cached kernels depend.

    Raises ValueError if PLAIT_ISA names no instruction set that is known here.
    """
    if name := os.environ.get("PLAIT_ISA"):
        if name not in ISAS:
            raise ValueError(
                f"PLAIT_ISA is {name!r}; it can be {' or '.join(map(repr, ISAS))}, or unset for this CPU's own"
            )
        return ISAS[name]
    return llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()


COMPILED_FOR = parse_features(compile_target()[1])


def has_features(*names: str) -> bool:
    """Returns whether kernels may use all of these features."""
    return COMPILED_FOR.issuperset(names)
