"""The packed decoder with a KV cache in int8: close to bfloat16, half the memory, bits independent of the batch."""

from __future__ import annotations

import pytest
import torch
from family_cases import FAMILY_CASES
from tiny_hf_models import all_logits, randomized, run, runner, text, transformers_logits

from plait.kernels.cpu.decoder import missing_features
from plait.runtime.errors import InputError

SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=400)
SIZES |= dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-23: the kernels need AVX2")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    case = FAMILY_CASES[request.param]
    more = dict(next(iter(case.packed_variants.values()))) if request.param == "gemma3" else {}
    return randomized(case.model_class(case.model_class.config_class(**SIZES | more)))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8-cache")
    model.save_pretrained(folder)
    return folder


def packed(folder, **settings):
    return runner(folder, dtype="bfloat16", weights="int8", max_pages=700, **settings)


def test_logits_are_close_to_those_with_a_cache_in_bfloat16(model, folder):
    tokens = text(150, 0)
    exact = transformers_logits(model, tokens)
    errors = {
        kind: ((all_logits(packed(folder, kv_dtype=kind), tokens) - exact).norm() / exact.norm()).item()
        for kind in ("auto", "int8")
    }
    assert errors["auto"] < errors["int8"] < 1.5 * errors["auto"] + 0.01


def test_a_page_takes_half_the_memory(folder):
    narrow, wide = packed(folder, kv_dtype="int8"), packed(folder)
    assert narrow.page_bytes == pytest.approx(wide.page_bytes * (64 + 4) / (2 * 64))
    assert narrow.kv_cache.nbytes == 700 * narrow.page_bytes


def test_bits_do_not_depend_on_chunks_or_batch(folder):
    narrow, tokens = packed(folder, kv_dtype="int8", deterministic=True), text(200, 1)
    single, start, slots = all_logits(narrow, tokens), 0, 300
    for count in (1, 70, 1, 65, 63):
        rows = [(tokens, range(200), start, count, start)]
        rows += [(text(20, i), range(slots + 20 * i, slots + 20 * i + 20), 0, 20, 19) for i in range(count % 9)]
        assert torch.equal(run(narrow, rows[::-1])[-1], single[start : start + count])
        start += count


def test_other_types_of_cache_are_refused(folder):
    with pytest.raises(InputError, match="kv_dtype 'fp8' needs Triton's attention on a GPU; a CPU has 'int8'"):
        packed(folder, kv_dtype="fp8")
