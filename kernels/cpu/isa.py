"""The CPU features that kernels are compiled for: this CPU's own, or those that two of numba's variables name instead.

    NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c      as on a CPU with AVX2 only

Only LLVM knows which features a CPU's name implies; with both settings only the listed features count.
"""

from __future__ import annotations

import os

import llvmlite.binding

# feature -> prefixes of the features that LLVM drops if it is missing
DEPENDENT_FEATURES = {"avx": ("avx", "fma", "f16c"), "avx2": ("avx512", "avxvnni"), "avx512f": ("avx512", "amx-avx512")}


def parse_features(own: str, name: str | None, listed: str | None) -> frozenset[str]:
    """Returns the features that a compiler may use, from this CPU's `own` ones and the settings' `name` and `listed`.

    Features are written as "+avx2,-avx512f".
    """
    parts = [] if listed is not None and name is not None else own.split(",")
    on: set[str] = set()
    for part in [*parts, *(listed or "").split(",")]:
        (on.add if part.startswith("+") else on.discard)(part[1:])
    for feature, others in DEPENDENT_FEATURES.items():
        if feature not in on:
            on = {name for name in on if not name.startswith(others)}
    return frozenset(on)


def _own_features() -> str:
    """Returns this CPU's features; none of AVX with NUMBA_ENABLE_AVX=0."""
    features = llvmlite.binding.get_host_cpu_features()
    if os.environ.get("NUMBA_ENABLE_AVX") == "0":
        features.update({name: False for name in features if name.startswith("avx")})
    listed: str = features.flatten()
    return listed


def _listed_features() -> str | None:
    """Returns the features of NUMBA_CPU_FEATURES; for a "generic" CPU, none is the default."""
    default = "" if (_cpu_name() or "").lower() == "generic" else None
    return os.environ.get("NUMBA_CPU_FEATURES", default)


def _cpu_name() -> str | None:
    return os.environ.get("NUMBA_CPU_NAME") or None


COMPILED_FOR = parse_features(_own_features(), _cpu_name(), _listed_features())


def has_features(*names: str) -> bool:
    """Returns whether kernels may use all of these features."""
    return COMPILED_FOR.issuperset(names)


def compile_target() -> tuple[str, str]:
    """Returns the CPU and the features that LLVM compiles for, on which cached kernels depend."""
    listed = _listed_features()
    return _cpu_name() or llvmlite.binding.get_host_cpu_name(), _own_features() if listed is None else listed
