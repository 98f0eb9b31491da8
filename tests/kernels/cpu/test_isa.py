"""The CPU features that kernels are compiled for: the CPU's own, or those of a smaller instruction set."""

from __future__ import annotations

import pytest
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from plait.kernels.cpu import isa
from plait.kernels.cpu.compiler import object_code


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("+avx,+avx2,+fma,+avx512f,+avx512vnni,-avxvnni,+bmi", {"avx", "avx2", "fma", "avx512f", "avx512vnni", "bmi"}),
        ("+avx,+avx2,+fma,-avx512f,+avx512vnni", {"avx", "avx2", "fma"}),
        ("+avx,+fma,+f16c,-avx2,+avx512f,+avxvnni", {"avx", "fma", "f16c"}),
        ("-avx,+avx2,+fma,+bmi", {"bmi"}),
        ("", set()),
    ],
)
def test_a_missing_feature_removes_the_features_that_need_it(listed, expected):
    assert isa.parse_features(listed) == expected


def test_the_target_is_this_cpu_or_the_instruction_set_of_the_setting(monkeypatch):
    monkeypatch.delenv("PLAIT_ISA", raising=False)
    assert isa.compile_target() == (get_host_cpu_name(), get_host_cpu_features().flatten())
    monkeypatch.setenv("PLAIT_ISA", "avx2")
    name, features = isa.compile_target()
    assert name == "x86-64-v3" and isa.parse_features(features) == {"avx", "avx2", "fma", "f16c"}


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("PLAIT_ISA", "avx3")
    with pytest.raises(ValueError, match="PLAIT_ISA is 'avx3'; it can be 'avx2'"):
        isa.compile_target()


def test_cached_kernels_depend_on_the_compile_target(monkeypatch):
    monkeypatch.delenv("PLAIT_ISA", raising=False)
    own = object_code.cache_path("kernels")
    monkeypatch.setenv("PLAIT_ISA", "avx2")
    assert object_code.cache_path("kernels") != own
