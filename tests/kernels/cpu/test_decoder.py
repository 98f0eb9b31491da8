"""The packed decoder: logits close to transformers, and bits that do not depend on the batch or the threads."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from family_cases import FAMILY_CASES, case_id
from tiny_hf_models import (
    all_logits,
    has_experts,
    randomized,
    relative_error,
    run,
    runner,
    text,
    transformers_logits,
    write_gguf,
)

from plait.kernels.cpu import amx, decoder_args, decoder_kernels
from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.decoder import AMX_MIN_TOKENS, MIN_PARTITION_ROWS, CpuDecoder, missing_features
from plait.kernels.numpy_layout import NumpyAttentionLayout
from plait.runtime.errors import InputError

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=400)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
MODELS = {
    case_id((family, variant)): (case.model_class, settings)
    for family, case in FAMILY_CASES.items()
    for variant, settings in case.packed_variants.items()
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


@pytest.fixture(scope="module", params=["with the CPU's instructions", "without AMX"])
def packed(request, folder):
    """A deterministic runner, with this CPU's instructions and without AMX: bits depend on the sequence only."""
    packed_runner = runner(folder, dtype="bfloat16", weights="int8", max_pages=700, deterministic=True)
    assert isinstance(packed_runner.model, CpuDecoder)
    return packed_runner if request.param == "with the CPU's instructions" else without_amx(packed_runner)


def without_amx(packed_runner):
    packed_runner.model = CpuDecoder(packed_runner.model.weights, threads=2, amx_min_tokens=None)
    return packed_runner


@pytest.fixture(scope="module")
def nondeterministic(folder):
    """A runner that, with AMX, multiplies steps of many tokens in bfloat16 and the others in int8."""
    return runner(folder, dtype="bfloat16", weights="int8", max_pages=700)


def test_int8_weights_are_nearly_as_close_as_bfloat16(model, folder, packed, nondeterministic):
    tokens = text(150, 0)
    exact = transformers_logits(model, tokens)
    plain = relative_error(all_logits(runner(folder, dtype="bfloat16", weights="bf16"), tokens), exact)
    assert relative_error(all_logits(packed, tokens), exact) < 4 * plain
    assert relative_error(all_logits(nondeterministic, tokens), exact) < 4 * plain


@needs_amx
def test_steps_of_many_tokens_multiply_in_bfloat16(model, folder, nondeterministic):
    """From `amx_min_tokens` on; shorter steps multiply in int8. With `deterministic` all steps multiply in bfloat16."""
    settings = dict(dtype="bfloat16", weights="int8", max_pages=700)
    always, never = runner(folder, deterministic=True, **settings), without_amx(runner(folder, **settings))
    long = text(AMX_MIN_TOKENS, 3)
    short = long[: AMX_MIN_TOKENS - 1]
    for tokens, same, other in ((short, never, always), (long, always, never)):
        logits, different = all_logits(nondeterministic, tokens), all_logits(other, tokens)
        assert torch.equal(logits, all_logits(same, tokens))
        assert not torch.equal(logits, different)
        assert relative_error(logits, different, has_experts(model)) < 0.05


@needs_amx
def test_bfloat16_bits_do_not_depend_on_chunks_or_batch(nondeterministic):
    tokens = text(200, 1)
    single, start, slots = all_logits(nondeterministic, tokens), 0, 300
    for count in (12, 70, 33, 85):
        rows = [(tokens, range(200), start, count, start)]
        for i in range(count % 9):
            rows.append((text(20, i), range(slots + 20 * i, slots + 20 * i + 20), 0, 20, 0))
        assert torch.equal(run(nondeterministic, rows[::-1])[-1], single[start : start + count])
        start += count


def test_bits_do_not_depend_on_chunks_or_batch(packed):
    tokens = text(200, 1)
    single = all_logits(packed, tokens)
    start, slots = 0, 300
    for count in (1, 70, 1, 1, 63, 64):
        rows = [(tokens, range(200), start, count, start)]
        for i in range(count % 9):
            rows.append((text(20, i), range(slots + 20 * i, slots + 20 * i + 20), 0, 20, 19))
        logits = run(packed, rows[::-1])[-1]
        assert torch.equal(logits, single[start : start + count])
        start += count


def test_a_row_reads_keys_that_another_row_writes_in_the_same_step(packed):
    prefix, tail = text(90, 4), text(5, 5)
    together = run(packed, [(prefix, range(90), 0, 90, 89), (prefix + tail, range(95), 90, 5, 90)])[1]
    assert torch.equal(together, all_logits(packed, prefix + tail)[90:])


def test_logits_of_some_tokens_have_the_bits_of_all_logits(packed):
    hidden = packed.model.forward(np.arange(9, dtype=np.int32), _layout(9), packed.kv_cache).copy()
    ids = np.array([5, 96, 0, 33, 33, 64])
    selected = packed.model.logits(hidden, ids).copy()
    assert np.array_equal(selected, packed.model.logits(hidden)[:, ids])


def test_argmax_tokens_matches_the_logits(packed):
    hidden = packed.model.forward(np.arange(9, dtype=np.int32), _layout(9), packed.kv_cache).copy()
    hidden[3, 5] = np.nan
    maxima, logits = packed.model.argmax_tokens(hidden), packed.model.logits(hidden)
    for i in (0, 1, 2, 4, 5, 6, 7, 8):
        assert maxima[i].tolist() == [logits[i].max(), logits[i].argmax()]
    assert np.isnan(maxima[3, 0])
    highest, tokens = packed.argmax_tokens(hidden[:2])
    assert (highest, tokens) == (logits[:2].max(-1).tolist(), logits[:2].argmax(-1).tolist())


def _layout(count, cached=0, *others):
    """The layout of a row of `count` new and `cached` cached tokens, and of other rows (new, cached)."""
    from attention_cases import layout_of

    layout = layout_of([(count, cached), *others])[0]
    tensors = (layout.q_starts, layout.kv_starts, layout.kv_pages, layout.positions, layout.write_slots)
    return NumpyAttentionLayout(*(tensor.int().numpy() for tensor in tensors))


def test_gguf_weights_as_stored_are_packed(tmp_path):
    """The logits are close to those of the same file in float32."""
    kind, more = MODELS["llama, tied"]
    model = randomized(kind(kind.config_class(**SHAPE | more)))
    for quantization in ("Q8_0", "Q4_1", "Q5_0"):
        path = tmp_path / f"{quantization}.gguf"
        write_gguf(model, path, quantization)
        tokens = text(60, 2)
        packed = runner(path, dtype="bfloat16", weights="as-stored")
        assert isinstance(packed.model, CpuDecoder)
        assert relative_error(all_logits(packed, tokens), all_logits(runner(path), tokens)) < 0.06


def test_threads_do_not_change_bits(packed):
    """More threads than processors do not, and neither do row partitions; the last here does not fill its registers."""
    tokens = text(3 * MIN_PARTITION_ROWS - 7, 6)
    kv, ids = np.zeros_like(packed.kv_cache), np.array(tokens, np.int32)
    for amx_min_tokens in (None, 1):
        decoders = [CpuDecoder(packed.model.weights, threads, amx_min_tokens) for threads in (1, 2, 3, 16)]
        assert decoders[1]._num_partitions(len(ids)) == (2 if decoders[1]._uses_amx(len(ids)) else 1)
        first, *others = (decoder.forward(ids, _layout(len(ids)), kv).copy() for decoder in decoders)
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("others", [[], [(1, 20), (1, 300)], [(1, 20)] * 3])
def test_splitting_a_long_row_between_threads_does_not_change_its_bits(packed, others):
    """Neither do the other rows of the step, nor computing the splits one after the other."""
    layout = _layout(3, 380, *others)
    ids, slots = np.array(text(3 + len(others), 6), np.int32), int(layout.kv_pages.max()) + 1
    shape = (*packed.kv_cache.shape[:2], slots, *packed.kv_cache.shape[3:])
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint16).numpy()
    results = []
    for threads, split_kv in ((1, False), (2, True), (3, True), (1, True)):
        decoder = CpuDecoder(packed.model.weights, threads, None)
        results.append(decoder.forward(ids, layout, kv).copy())
        if threads > 1:
            assert bool(decoder._settings[0, decoder_args.SPLIT_KV]) == split_kv
        assert np.array_equal(results[0], results[-1])
    single = CpuDecoder(packed.model.weights, 2, None).forward(ids[:3], _layout(3, 380), kv)
    if layout.kv_pages[:383].tolist() == _layout(3, 380).kv_pages.tolist():
        assert np.array_equal(single, results[0][:3])


@needs_amx
def test_a_single_thread_computes_all_row_partitions(packed):
    tokens = np.array(text(2 * MIN_PARTITION_ROWS + 3, 6), np.int32)
    kv, layout = np.zeros_like(packed.kv_cache), _layout(len(tokens))
    decoder = CpuDecoder(packed.model.weights, 2, 1)
    expected = decoder.forward(tokens, layout, kv).copy()
    partitions, decoder.threads = decoder._num_partitions(len(tokens)), 1
    decoder._num_partitions = lambda count: partitions
    assert partitions == 2 and np.array_equal(decoder.forward(tokens, layout, kv), expected)


def test_unsupported_weight_formats_are_refused_with_the_reason(tmp_path):
    kind, _ = MODELS["llama, tied"]
    narrow = randomized(kind(kind.config_class(**SHAPE | dict(head_dim=16))))
    narrow.save_pretrained(tmp_path)
    for settings, reason in (
        (dict(weights="int4", dtype="bfloat16"), "multiples of 32"),
        (dict(weights="int8", dtype="float32"), "not float32"),
        (dict(weights="q4"), "weights must be as-stored"),
    ):
        with pytest.raises(InputError, match=reason):
            runner(tmp_path, **settings)
    assert not isinstance(runner(tmp_path, dtype="bfloat16").model, CpuDecoder)


def test_batches_of_1_to_300_rows_have_the_same_bits(packed):
    """One token after the same text."""
    tokens = text(2, 7)
    (single,) = run(packed, [(tokens, range(2), 0, 2, 1)])
    for rows in itertools.chain(range(1, 9), (16, 33, 100, 300)):
        results = run(packed, [(tokens, (2 * i, 2 * i + 1), 0, 2, 1) for i in range(rows)])
        assert all(torch.equal(logits, single) for logits in results)


def test_kernels_compiled_quickly_give_the_bits_of_optimized_ones(packed, monkeypatch) -> None:
    quick = KernelLibrary("decoder", *decoder_kernels.LIBRARY._functions.values())
    optimized = np.asarray(all_logits(packed, text(60, 0))).tobytes(), packed.kv_cache[:, :, :60].tobytes()
    quick.install(_quick_decoder())
    for kernel in (decoder_kernels.forward, decoder_kernels.compute_logits):
        monkeypatch.setattr(kernel, "_library", quick)
    packed.kv_cache[:] = 0
    assert np.asarray(all_logits(packed, text(60, 0))).tobytes() == optimized[0]
    assert packed.kv_cache[:, :, :60].tobytes() == optimized[1]


@functools.cache
def _quick_decoder() -> bytes:
    return object_code.quick_code(decoder_kernels.LIBRARY._module)
