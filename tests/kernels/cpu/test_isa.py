"""The CPU features that kernels are compiled for: the CPU's own, or what numba's settings make of them."""

from __future__ import annotations

import pytest
from llvmlite.binding import get_host_cpu_name
from numba.core import config
from numba.core.codegen import get_host_cpu_features

from plait.kernels.cpu import isa
from plait.kernels.cpu.compiler import object_code

OWN = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512vnni,-avxvnni,+bmi"
BASE = {"avx", "avx2", "fma", "f16c", "bmi"}


@pytest.mark.parametrize(
    ("name", "listed", "expected"),
    [
        (None, None, BASE | {"avx512f", "avx512vnni"}),
        ("haswell", None, BASE | {"avx512f", "avx512vnni"}),  # numba still lists the CPU's own features then
        (None, "-avx512f", BASE),
        (None, "-avx512f,+avxvnni", BASE | {"avxvnni"}),
        (None, "-avx2", {"avx", "fma", "f16c", "bmi"}),
        (None, "-avx", {"bmi"}),
        (None, "", BASE | {"avx512f", "avx512vnni"}),
        ("haswell", "", set()),
        ("haswell", "+avx,+avx2", {"avx", "avx2"}),
    ],
)
def test_a_missing_feature_removes_the_features_that_need_it(name, listed, expected):
    assert isa.parse_features(OWN, name, listed) == expected


def test_cached_kernels_depend_on_the_compile_target(monkeypatch):
    paths = [object_code.cache_path("kernels")]
    for setting, value in (("NUMBA_CPU_NAME", "x86-64-v3"), ("NUMBA_CPU_FEATURES", "+avx,+avx2")):
        monkeypatch.setenv(setting, value)
        paths.append(object_code.cache_path("kernels"))
    assert len(set(paths)) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx,+avx2"},
        {"NUMBA_ENABLE_AVX": "0"},
    ],
)
def test_the_target_is_that_of_numba(monkeypatch, settings):
    """numba compiles attention on torch's tensors for its own target, and the intrinsics for `isa`'s."""
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    config.reload_config()
    try:
        listed = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
        assert isa.compile_target() == (config.CPU_NAME or get_host_cpu_name(), listed)
    finally:
        monkeypatch.undo()
        config.reload_config()
