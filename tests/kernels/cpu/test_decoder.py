"""The packed decoder as a whole: close to transformers, the same bits in any company, refusals that say why."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from family_cases import FAMILY_CASES, case_id
from tiny_hf_models import all_logits, randomized, run, runner, text, transformers_logits, write_gguf

from plait.kernels.cpu import amx, decoder_kernels, precompile
from plait.kernels.cpu.decoder import AMX_MIN_TOKENS, MIN_PARTITION_ROWS, CpuDecoder, missing_features
from plait.kernels.numpy_layout import NumpyAttentionLayout
from plait.runtime.errors import InputError

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=400)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
MODELS = {
    case_id((family, variant)): (case.model_class, settings)
    for family, case in FAMILY_CASES.items()
    for variant, settings in (case.packed_variants or {}).items()
}
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
needs_amx = pytest.mark.skipif(not amx.available(), reason="2026-11-21: products in bfloat16 need AMX")


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    kind, more = MODELS[request.param]
    return randomized(kind(kind.config_class(**SHAPE | more)))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["as the CPU has it", "8 bits"])
def packed(request, folder):
    """`deterministic`, as here and as on a CPU without AMX: bits are a row's own."""
    found = runner(folder, dtype="bfloat16", weights="int8", max_pages=700, deterministic=True)
    assert isinstance(found.model, CpuDecoder)
    return found if request.param == "as the CPU has it" else without_amx(found)


def without_amx(found):
    found.model = CpuDecoder(found.model.weights, threads=2, amx_min_tokens=None)
    return found


@pytest.fixture(scope="module")
def nondeterministic(folder):
    """Without `deterministic`: where there is AMX, steps of many tokens multiply in bfloat16."""
    return runner(folder, dtype="bfloat16", weights="int8", max_pages=700)


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_eight_bits_stay_nearly_as_near_as_bfloat16(model, folder, packed, nondeterministic):
    tokens = text(150, 0)
    exact = transformers_logits(model, tokens)
    plain = relative(all_logits(runner(folder, dtype="bfloat16", weights="bf16"), tokens), exact)
    assert relative(all_logits(packed, tokens), exact) < 4 * plain
    assert relative(all_logits(nondeterministic, tokens), exact) < 4 * plain


@needs_amx
def test_many_tokens_are_multiplied_in_bfloat16(folder, nondeterministic):
    """From `amx_min_tokens` on, below it in 8 bits; with `deterministic` all of them."""
    settings = dict(dtype="bfloat16", weights="int8", max_pages=700)
    always, never = runner(folder, deterministic=True, **settings), without_amx(runner(folder, **settings))
    long = text(AMX_MIN_TOKENS, 3)
    short = long[: AMX_MIN_TOKENS - 1]
    for tokens, same, other in ((short, never, always), (long, always, never)):
        found, different = all_logits(nondeterministic, tokens), all_logits(other, tokens)
        assert torch.equal(found, all_logits(same, tokens))
        assert not torch.equal(found, different)
        assert relative(found, different) < 0.05


@needs_amx
def test_in_bfloat16_bits_do_not_depend_on_chunks_or_company(nondeterministic):
    tokens = text(200, 1)
    alone, at, company = all_logits(nondeterministic, tokens), 0, 300
    for count in (12, 70, 33, 85):
        rows = [(tokens, range(200), at, count, at)]
        for i in range(count % 9):
            rows.append((text(20, i), range(company + 20 * i, company + 20 * i + 20), 0, 20, 0))
        assert torch.equal(run(nondeterministic, rows[::-1])[-1], alone[at : at + count])
        at += count


def test_bits_do_not_depend_on_chunks_or_company(packed):
    tokens = text(200, 1)
    alone = all_logits(packed, tokens)
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
    assert torch.equal(together, all_logits(packed, prefix + tail)[90:])


def test_columns_have_the_bits_of_all_logits(packed):
    hidden = packed.model.forward(np.arange(9, dtype=np.int32), _layout(9), packed.kv_cache).copy()
    ids = np.array([5, 96, 0, 33, 33, 64])
    some = packed.model.logits(hidden, ids).copy()
    assert np.array_equal(some, packed.model.logits(hidden)[:, ids])


def test_what_is_compiled_ahead_is_what_a_step_calls(packed):
    """Types and all; else each kernel would be compiled twice."""
    for function, types in precompile.KERNELS.values():
        assert function.signatures == [types]


def test_the_likeliest_are_those_of_the_logits(packed):
    hidden = packed.model.forward(np.arange(9, dtype=np.int32), _layout(9), packed.kv_cache).copy()
    hidden[3, 5] = np.nan
    peaks, logits = packed.model.argmax_tokens(hidden), packed.model.logits(hidden)
    for i in (0, 1, 2, 4, 5, 6, 7, 8):
        assert peaks[i].tolist() == [logits[i].max(), logits[i].argmax()]
    assert np.isnan(peaks[3, 0])
    highest, tokens = packed.argmax_tokens(hidden[:2])
    assert (highest, tokens) == (logits[:2].max(-1).tolist(), logits[:2].argmax(-1).tolist())


def _layout(count, cached=0, *others):
    """A row of `count` new tokens behind so many, and other rows (new, cached)."""
    from attention_cases import layout_of

    made = layout_of([(count, cached), *others])[0]
    parts = (made.q_starts, made.kv_starts, made.kv_pages, made.positions, made.write_slots)
    return NumpyAttentionLayout(*(part.int().numpy() for part in parts))


def test_the_files_own_numbers_are_used(tmp_path):
    """Q8_0 in a GGUF: "as-stored" is packed, and near what the same file gives in float32."""
    kind, more = MODELS["llama, tied"]
    model = randomized(kind(kind.config_class(**SHAPE | more)))
    for form, bound in (("Q8_0", 0.06), ("Q4_1", 0.06), ("Q5_0", 0.06)):
        path = tmp_path / f"{form}.gguf"
        write_gguf(model, path, form)
        tokens = text(60, 2)
        ours = runner(path, dtype="bfloat16", weights="as-stored")
        assert isinstance(ours.model, CpuDecoder)
        assert relative(all_logits(ours, tokens), all_logits(runner(path), tokens)) < bound


def test_threads_do_not_change_bits(packed):
    """Nor strips of rows, each thread's own: the last one is not a whole number of matrix registers."""
    tokens = text(3 * MIN_PARTITION_ROWS - 7, 6)
    kv, ids = np.zeros_like(packed.kv_cache), np.array(tokens, np.int32)
    for amx_min_tokens in (None, 1):
        decoders = [CpuDecoder(packed.model.weights, threads, amx_min_tokens) for threads in (1, 2)]
        assert decoders[1]._num_partitions(len(ids)) == (2 if decoders[1]._uses_amx(len(ids)) else 1)
        found = [each.forward(ids, _layout(len(ids)), kv).copy() for each in decoders]
        assert np.array_equal(*found)


@pytest.mark.parametrize("others", [[], [(1, 20), (1, 300)], [(1, 20)] * 3])
def test_threads_that_share_out_a_long_row_do_not_change_its_bits(packed, others):
    """Nor does attention to splits one after the other, in a step without company."""
    layout = _layout(3, 380, *others)
    ids, slots = np.array(text(3 + len(others), 6), np.int32), int(layout.kv_pages.max()) + 1
    shape = (*packed.kv_cache.shape[:2], slots, *packed.kv_cache.shape[3:])
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint16).numpy()
    found = []
    for threads, apart in ((1, False), (2, True), (3, True), (1, True)):
        decoder = CpuDecoder(packed.model.weights, threads, None)
        found.append(decoder.forward(ids, layout, kv).copy())
        if threads > 1:
            assert bool(decoder._settings[0, decoder_kernels.SPLIT_KV]) == apart
        assert np.array_equal(found[0], found[-1])
    alone = CpuDecoder(packed.model.weights, 2, None).forward(ids[:3], _layout(3, 380), kv)
    if layout.kv_pages[:383].tolist() == _layout(3, 380).kv_pages.tolist():
        assert np.array_equal(alone, found[0][:3])


@needs_amx
def test_one_thread_that_comes_does_all_strips(packed):
    tokens = np.array(text(2 * MIN_PARTITION_ROWS + 3, 6), np.int32)
    kv, layout = np.zeros_like(packed.kv_cache), _layout(len(tokens))
    decoder = CpuDecoder(packed.model.weights, 2, 1)
    expected = decoder.forward(tokens, layout, kv).copy()
    counted, decoder.threads = decoder._num_partitions(len(tokens)), 1
    decoder._num_partitions = lambda count: counted
    assert counted == 2 and np.array_equal(decoder.forward(tokens, layout, kv), expected)


def test_forms_that_cannot_be_had_say_why(tmp_path):
    kind, _ = MODELS["llama, tied"]
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
