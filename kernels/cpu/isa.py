"""Which instructions kernels are compiled for: this CPU's, or those that numba's own settings name instead.

    NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c      as on a CPU with AVX2

What the name of a CPU implies is LLVM's knowledge alone: with both settings only the features that are listed count.

Knows: numba's settings, llvmlite's names of features. Must not know: what is computed with them.
"""

from __future__ import annotations

import llvmlite.binding
from numba import config
from numba.core.codegen import get_host_cpu_features

# What goes with a feature that is missing, by how the names begin; LLVM has it so.
DEPENDENT_FEATURES = {"avx": ("avx", "fma", "f16c"), "avx2": ("avx512", "avxvnni"), "avx512f": ("avx512", "amx-avx512")}


def parse_features(own: str, name: str | None, listed: str | None) -> frozenset[str]:
    """What a compiler may use: `own` and `listed` as "+avx2,-avx512f", of this CPU and of the settings, if any."""
    parts = [] if listed is not None and name is not None else own.split(",")
    on: set[str] = set()
    for part in [*parts, *(listed or "").split(",")]:
        (on.add if part.startswith("+") else on.discard)(part[1:])
    for feature, others in DEPENDENT_FEATURES.items():
        if feature not in on:
            on = {each for each in on if not each.startswith(others)}
    return frozenset(on)


COMPILED_FOR = parse_features(get_host_cpu_features(), config.CPU_NAME, config.CPU_FEATURES)


def has_features(*names: str) -> bool:
    """Whether kernels may use all of these."""
    return COMPILED_FOR.issuperset(names)


def compile_target() -> tuple[str, str]:
    """The CPU and the features that LLVM is told of, which kept kernels depend on."""
    listed = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return config.CPU_NAME or llvmlite.binding.get_host_cpu_name(), listed
