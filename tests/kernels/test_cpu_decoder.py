"""The packed decoder as a whole: close to transformers, the same bits in any company, refusals that say why."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny_models import randomized, run, runner, text, their_logits, whole_logits, write_gguf
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from plait.kernels.cpu_decoder import CpuDecoder, missing_features
from plait.kernels.ragged import Ragged
from plait.runtime.errors import InputError

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=400)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
MODELS = {
    "Llama, tied": (LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "Llama, 8 to a group": (LlamaForCausalLM, dict(num_attention_heads=8, num_key_value_heads=1, head_dim=64)),
    "Mistral, sliding window": (MistralForCausalLM, dict(sliding_window=11)),
    "Qwen 2": (Qwen2ForCausalLM, {}),
    "Qwen 3": (Qwen3ForCausalLM, dict(head_dim=128)),
}
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-21: the kernels need AVX-512 VNNI")


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    kind, more = MODELS[request.param]
    return randomized(kind(kind.config_class(**SHAPE | more)))


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    model.save_pretrained(folder)
    found = runner(folder, dtype="bfloat16", weights="int8", max_pages=700)
    assert isinstance(found.model, CpuDecoder)
    return found


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_eight_bits_stay_nearly_as_near_as_bfloat16(model, packed, tmp_path):
    model.save_pretrained(tmp_path)
    tokens = text(150, 0)
    exact = their_logits(model, tokens)
    plain = whole_logits(runner(tmp_path, dtype="bfloat16", weights="bf16"), tokens)
    assert relative(whole_logits(packed, tokens), exact) < 4 * relative(plain, exact)


def test_bits_do_not_depend_on_chunks_or_company(packed):
    tokens = text(200, 1)
    alone = whole_logits(packed, tokens)
    at, company = 0, 300
    for count in (1, 70, 1, 1, 63, 64):
        rows = [(tokens, range(200), at, count, at)]
        for i in range(count % 9):
            rows.append((text(20, i), range(company + 20 * i, company + 20 * i + 20), 0, 20, 19))
        found = run(packed, rows[::-1])[-1]
        assert torch.equal(found, alone[at : at + count])
        at += count


def test_a_row_reads_what_its_neighbour_writes_in_the_same_step(packed):
    prefix, tail = text(90, 4), text(5, 5)
    together = run(packed, [(prefix, range(90), 0, 90, 89), (prefix + tail, range(95), 90, 5, 90)])[1]
    assert torch.equal(together, whole_logits(packed, prefix + tail)[90:])


def test_columns_have_the_bits_of_all_logits(packed):
    hidden = packed.model.forward(np.arange(9, dtype=np.int32), _layout(9), packed.kv_cache).copy()
    ids = np.array([5, 96, 0, 33, 33, 64])
    some = packed.model.logits(hidden, ids).copy()
    assert np.array_equal(some, packed.model.logits(hidden)[:, ids])


def _layout(count):
    from attention_cases import layout_of

    made = layout_of([(count, 0)])[0]
    parts = (made.q_starts, made.kv_starts, made.kv_pages, made.positions, made.write_pages)
    return Ragged(*(part.int().numpy() for part in parts))


def test_the_files_own_numbers_are_used(tmp_path):
    """Q8_0 in a GGUF: "as-stored" is packed, and near what the same file gives in float32."""
    kind, more = MODELS["Llama, tied"]
    model = randomized(kind(kind.config_class(**SHAPE | more)))
    for form, bound in (("Q8_0", 0.06), ("Q4_1", 0.06), ("Q5_0", 0.06)):
        path = tmp_path / f"{form}.gguf"
        write_gguf(model, path, form)
        tokens = text(60, 2)
        ours = runner(path, dtype="bfloat16", weights="as-stored")
        assert isinstance(ours.model, CpuDecoder)
        assert relative(whole_logits(ours, tokens), whole_logits(runner(path), tokens)) < bound


def test_threads_do_not_change_bits(packed):
    tokens = text(120, 6)
    one = CpuDecoder(packed.model.weights, threads=1)
    kv, ids = np.zeros_like(packed.kv_cache), np.array(tokens, np.int32)
    found = [each.forward(ids, _layout(120), kv).copy() for each in (one, packed.model)]
    assert np.array_equal(*found)


def test_forms_that_cannot_be_had_say_why(tmp_path):
    kind, _ = MODELS["Llama, tied"]
    narrow = randomized(kind(kind.config_class(**SHAPE | dict(head_dim=16))))
    narrow.save_pretrained(tmp_path)
    for settings, why in (
        (dict(weights="int4", dtype="bfloat16"), "multiples of 32"),
        (dict(weights="int8", dtype="float32"), "not with float32"),
        (dict(weights="q4"), "does not fit"),
    ):
        with pytest.raises(InputError, match=why):
            runner(tmp_path, **settings)
    assert not isinstance(runner(tmp_path, dtype="bfloat16").model, CpuDecoder)


def test_every_number_of_rows_up_to_300_has_the_same_bits(packed):
    """One token after the same text, in batches of many sizes."""
    tokens = text(2, 7)
    (alone,) = run(packed, [(tokens, range(2), 0, 2, 1)])
    for rows in itertools.chain(range(1, 9), (16, 33, 100, 300)):
        found = run(packed, [(tokens, (2 * i, 2 * i + 1), 0, 2, 1) for i in range(rows)])
        assert all(torch.equal(each, alone) for each in found)
