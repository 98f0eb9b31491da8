"""Which instructions kernels are compiled for: the CPU's own, less or other ones by numba's settings."""

from __future__ import annotations

import pytest

from plait.kernels.cpu import isa, precompile

OWN = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512vnni,-avxvnni,+bmi"
BASE = {"avx", "avx2", "fma", "f16c", "bmi"}


@pytest.mark.parametrize(
    ("name", "listed", "expected"),
    [
        (None, None, BASE | {"avx512f", "avx512vnni"}),
        ("haswell", None, BASE | {"avx512f", "avx512vnni"}),  # numba then lists the CPU's own all the same
        (None, "-avx512f", BASE),
        (None, "-avx512f,+avxvnni", BASE | {"avxvnni"}),
        (None, "-avx2", {"avx", "fma", "f16c", "bmi"}),
        (None, "-avx", {"bmi"}),
        (None, "", BASE | {"avx512f", "avx512vnni"}),
        ("haswell", "", set()),
        ("haswell", "+avx,+avx2", {"avx", "avx2"}),
    ],
)
def test_settings_take_away_what_goes_with_a_feature(name, listed, expected):
    assert isa.parse_features(OWN, name, listed) == expected


def test_kernels_are_kept_for_what_they_were_compiled_for(monkeypatch):
    marks = [precompile._marker_path()]
    for setting, value in (("CPU_NAME", "x86-64-v3"), ("CPU_FEATURES", "+avx,+avx2")):
        monkeypatch.setattr(isa.config, setting, value)
        marks.append(precompile._marker_path())
    assert len(set(marks)) == 3
