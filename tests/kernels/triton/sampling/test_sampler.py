"""The sampling kernels, compared with their reference, with the CPU's sampler and with statistics."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import reference_sampling as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import f32, inputs_of, logits_of, pack, row_of
from triton_device import DEVICE, INTERPRETED

from plait.kernels.sampling_inputs import NO_TOKEN, NOT_FINITE, LogitAdjustments, Penalties, RowBias, RowMasks
from plait.kernels.triton.sampling import logit_adjustments, sampler, vocab_chunks
from plait.runtime.sampling.logit_ops import hash_uniform
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations
from plait.runtime.sampling.torch_ops import TorchLogitOperations
from plait.runtime.sampling_params import sampling_params

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
INF = math.inf


def random_adjustments(rows: int, vocab: int, seed: int, parts: tuple[bool, bool, bool]) -> LogitAdjustments:
    g = torch.Generator().manual_seed(seed)
    row_maps = [(torch.randint(-1, rows, (rows,), generator=g)).int().to(DEVICE) for _ in range(3)]
    density = torch.rand(rows, 1, generator=g) ** 3
    words = pack(torch.rand(rows, vocab, generator=g) < density)
    counts = (torch.rand(rows, vocab, generator=g) * 1.2).int().to(DEVICE) * 3
    bias = torch.where(torch.rand(rows, vocab, generator=g) < 0.01, 5.0, 0.0).to(DEVICE)
    frequency, presence = (torch.rand(2, rows, generator=g) * 4 - 2).to(DEVICE)
    prompts = pack(torch.rand(rows, vocab, generator=g) < 0.3)
    repetition = torch.where(torch.rand(rows, generator=g) < 0.3, 1.0, torch.rand(rows, generator=g) * 3 + 0.1)
    return LogitAdjustments(
        RowMasks(words, row_maps[0]) if parts[0] else None,
        RowBias(bias, row_maps[1]) if parts[1] else None,
        Penalties(counts, prompts, row_maps[2], frequency, presence, repetition.to(DEVICE)) if parts[2] else None,
    )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 31, 33, 1000, 4096, 9001]),
    st.integers(0, 10**6),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtypes,
)
def test_adjusted_logits_equal_the_reference(rows, vocab, seed, parts, dtype):
    logits = logits_of(rows, vocab, 5.0, seed, dtype)
    logits[0, seed % vocab] = [0.0, INF, -INF, math.nan][seed % 4]
    adjustments = random_adjustments(rows, vocab, seed, parts)
    adjusted, expected_logits = (torch.empty(rows, vocab, device=DEVICE) for _ in range(2))
    expected = torch.empty(rows, dtype=torch.int32, device=DEVICE)
    chunks = (rows, -(-vocab // vocab_chunks.chunk_size(vocab)))
    chunk_max, chunk_argmax = torch.empty(chunks, device=DEVICE), torch.empty(chunks, dtype=torch.int32, device=DEVICE)
    logit_adjustments.launch_adjust_logits(logits, adjusted, chunk_max, chunk_argmax, adjustments)
    largest = chunk_max.amax(dim=1)  # NaN if there is one
    status = torch.where(largest.isnan(), NOT_FINITE, torch.where(largest == -INF, NO_TOKEN, 0))
    reference.adjust_logits(logits, expected_logits, expected, adjustments)
    assert status.tolist() == expected.tolist()
    is_finite = status != NOT_FINITE
    torch.testing.assert_close(adjusted[is_finite], expected_logits[is_finite], atol=2e-6, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(row_of, min_size=1, max_size=5),
    st.sampled_from([2, 40, 1000, 4097, 4300]),
    st.sampled_from([0.0, 0.3, 3.0, 12.0]),
    st.integers(0, 10**6),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtypes,
)
def test_sampled_tokens_equal_the_reference(rows, vocab, spread, seed, parts, dtype):
    logits = logits_of(len(rows), vocab, spread, seed, dtype)
    inputs, adjustments = inputs_of(rows), random_adjustments(len(rows), vocab, seed, parts)
    expected = reference.sample(logits, inputs, adjustments).tolist()
    assert sampler.sample(logits, inputs, adjustments).tolist() == expected, rows


@pytest.mark.parametrize("top", [(-1, 0.9999, 0.0), (4200, 1.0, 0.0), (-1, 1.0, 0.001), (4200, 0.9, 0.2)])
def test_a_row_with_too_many_candidates_is_searched_in_place(top):
    top_k, top_p, min_p = top
    rows = [(1.5, top_k, f32(top_p), f32(min_p), seed, 3) for seed in range(4)]
    logits = logits_of(4, 4300, 0.2, 7)
    work = sampler.SamplingWorkspace.allocate(4, 4300, DEVICE)
    tokens = sampler.sample(logits, inputs_of(rows), workspace=work)
    assert (work.summary[:, 0] > sampler.CANDIDATES).all()
    assert tokens.tolist() == reference.sample(logits, inputs_of(rows)).tolist()


@pytest.mark.parametrize("top", [(7, 1.0, 0.1), (-1, 0.9999, 0.1), (7, 0.9999, 0.1)])
def test_min_p_leaves_fewer_tokens_than_the_other_filters(top):
    """The search for the other filters' thresholds then finds no token at its end."""
    top_k, top_p, min_p = top
    logits = torch.zeros(1, 4097, device=DEVICE)
    logits[0, [136, 3215]] = 7.0
    for step in range(8):
        inputs = inputs_of([(0.5, top_k, f32(top_p), f32(min_p), 0, step)])
        assert sampler.sample(logits, inputs).tolist() == reference.sample(logits, inputs).tolist()


@pytest.mark.parametrize("top", [(50, 0.9, 0.1), (1000, 0.5, 0.0), (1000, 0.5, 0.3)])
def test_top_p_is_relative_to_the_tokens_that_top_k_keeps(top):
    """Including those that top-p and min-p exclude afterwards."""
    top_k, top_p, min_p = top
    rows = [(1.5, top_k, f32(top_p), f32(min_p), seed, 3) for seed in range(60)]
    logits = logits_of(1, 4097, 1.0, 7).expand(60, -1).contiguous()
    logits = logits[:12] if INTERPRETED else logits
    rows = rows[: len(logits)]
    expected = reference.sample(logits, inputs_of(rows)).tolist()
    assert sampler.sample(logits, inputs_of(rows)).tolist() == expected


def test_top_k_includes_the_kth_token_if_it_is_alone_in_its_bin():
    """Logits so far apart that no two tokens share a bin of the histogram."""
    logits = (-0.2 * torch.arange(60, device=DEVICE)).expand(12, -1).contiguous()
    rows = [(1.0, 5, 1.0, 0.0, seed, 0) for seed in range(12)]
    work = sampler.SamplingWorkspace.allocate(12, 60, DEVICE)
    tokens = sampler.sample(logits, inputs_of(rows), workspace=work).tolist()
    assert work.summary[:, 0].tolist() == [5] * 12
    assert tokens == reference.sample(logits, inputs_of(rows)).tolist()


def test_a_row_depends_on_its_seed_and_not_on_other_rows():
    rows = [(1.0, -1, 0.9, 0.0, 5, 1), (0.0, -1, 1.0, 0.0, 1, 0), (1.3, 40, 1.0, 0.1, 7, 9), (1.0, -1, 1.0, 0.0, 3, 2)]
    rows = [(t, k, f32(p), f32(m), s, n) for t, k, p, m, s, n in rows]
    logits = logits_of(4, 5000, 3.0, 1)
    batched = sampler.sample(logits, inputs_of(rows)).tolist()
    assert sampler.sample(logits, inputs_of(rows)).tolist() == batched
    for i, row in enumerate(rows):
        assert sampler.sample(logits[i : i + 1], inputs_of([row])).tolist() == [batched[i]]
    order = [2, 0, 3, 1]
    shuffled = sampler.sample(logits[order].contiguous(), inputs_of([rows[i] for i in order])).tolist()
    assert shuffled == [batched[i] for i in order]


def test_rows_without_a_token_get_a_status_and_other_rows_are_unaffected():
    logits = logits_of(5, 3000, 2.0, 3)
    logits[1, 2999] = math.nan
    logits[2, 0] = INF
    logits[3] = -INF
    words = pack(torch.zeros(1, 3000, dtype=torch.bool))
    masks = RowMasks(words, torch.tensor([-1, -1, -1, -1, 0], dtype=torch.int32, device=DEVICE))
    for row in [(0.0, -1, 1.0, 0.0, 1, 1), (1.0, -1, 1.0, 0.0, 1, 1), (1.0, 9, 0.5, 0.0, 1, 1)]:
        tokens = sampler.sample(logits, inputs_of([row] * 5), LogitAdjustments(masks)).tolist()
        assert tokens[1:] == [NOT_FINITE, NOT_FINITE, NO_TOKEN, NO_TOKEN]
        assert tokens[0] == reference.sample(logits[:1], inputs_of([row])).item()


def test_a_single_allowed_token_is_always_taken():
    allowed = torch.zeros(3, 5000, dtype=torch.bool)
    for row, token in enumerate((0, 4096, 4999)):
        allowed[row, token] = True
    masks = RowMasks(pack(allowed), torch.arange(3, dtype=torch.int32, device=DEVICE))
    logits = logits_of(3, 5000, 8.0, 2)
    for row in [(0.0, -1, 1.0, 0.0, 4, 1), (2.0, -1, 1.0, 0.0, 4, 1), (2.0, 50, f32(0.9), f32(0.1), 4, 1)]:
        assert sampler.sample(logits, inputs_of([row] * 3), LogitAdjustments(masks)).tolist() == [0, 4096, 4999]


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-3])
def test_tiny_temperatures_are_greedy(temperature):
    logits = logits_of(3, 500, 1.0, 5)
    rows = [(temperature, k, f32(p), 0.0, 3, 1) for k, p in [(-1, 1.0), (5, 1.0), (-1, 0.9)]]
    assert sampler.sample(logits, inputs_of(rows)).tolist() == logits.argmax(-1).tolist()


def expected_shares(logits, temperature, top_k, top_p, min_p):
    """The distribution by definition, float64 [V]."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = torch.sort(probs, descending=True, stable=True).indices
    keep = torch.zeros_like(probs, dtype=torch.bool)
    first = order if top_k <= 0 else order[:top_k]
    total, mass = float(probs[first].sum()), 0.0
    for token in first.tolist():
        keep[token] = mass < top_p * total and probs[token] >= min_p * probs.max()
        mass += float(probs[token])
    return torch.where(keep, probs, 0) / probs[keep].sum()


@pytest.mark.parametrize(
    ("draw", "draws"),
    [(sampler.sample, 25 if INTERPRETED else 20_000), (reference.sample, 4000)],
    ids=["triton", "torch"],
)
@pytest.mark.parametrize("top", [(-1, 1.0, 0.0), (6, 1.0, 0.0), (-1, 0.8, 0.0), (-1, 1.0, 0.2), (9, 0.9, 0.05)])
def test_samples_follow_the_distribution(top, draw, draws):
    """Chi-square test at the 99.99% quantile, over fixed seeds."""
    top_k, top_p, min_p = top
    logits = torch.tensor([1.5, -0.5, 1.5, 0.0, 2.0, -1.0, 0.7, 0.2, -3.0, 1.0], device=DEVICE)
    rows = [(0.8, top_k, f32(top_p), f32(min_p), 1000 + i // 7, i) for i in range(draws)]
    tokens = draw(logits.expand(draws, -1).contiguous(), inputs_of(rows))
    counts = torch.bincount(tokens.long().cpu(), minlength=10).double()
    shares = expected_shares(logits.cpu(), 0.8, top_k, top_p, min_p)
    assert counts[shares == 0].sum() == 0
    real = shares > 0
    statistic = (((counts - draws * shares) ** 2)[real] / (draws * shares[real])).sum().item()
    freedom = int(real.sum()) - 1
    # Wilson and Hilferty's approximation of the 99.99% quantile
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@settings(max_examples=150, deadline=None)
@given(st.lists(row_of, min_size=1, max_size=4), st.sampled_from([0.5, 3.0]), st.integers(0, 10**6))
def test_the_reference_equals_the_cpu_sampler(rows, spread, seed):
    logits = logits_of(len(rows), 300, spread, seed).cpu()
    tokens = reference.sample(logits, type(inputs_of(rows))(*(c.cpu() for c in inputs_of(rows)))).tolist()
    generations = []
    for temperature, top_k, top_p, min_p, row_seed, step in rows:
        params = sampling_params(temperature=temperature, top_k=top_k if top_k > 0 else -1, top_p=top_p, min_p=min_p)
        generations.append(SimpleNamespace(params=params, seed=row_seed, num_sampled=step, output_counts={}))
    assert tokens == NumpyLogitOperations().draw_tokens(logits.numpy(), generations)
    assert tokens == TorchLogitOperations(torch.device("cpu")).draw_tokens(logits, generations)


def test_the_hash_equals_the_cpu_samplers():
    for seed, step in [(0, 0), (-1, 5), (2**63 - 1, 2**40), (-(2**63), 1), (12345, 678)]:
        assert reference.hash_seed_step(seed, step) == int(hash_uniform(seed, step) * 2.0**53) << 11


def test_count_tokens_skips_negative_rows_and_tokens():
    counts = torch.zeros(3, 10, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, 2, -1, 1], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([4, 9, 3, -1], dtype=torch.int32, device=DEVICE)
    expected = counts.clone()
    for _ in range(2):
        logit_adjustments.count_tokens(counts, rows, tokens)
        reference.count_tokens(expected, rows, tokens)
    assert torch.equal(counts, expected)
    assert counts.sum() == 4


def test_chunk_size_is_a_power_of_two_and_limits_the_chunks():
    for vocab in (1, 4096, 4097, 49152, 151_936, 262_144, 262_145, 1 << 22):
        size = vocab_chunks.chunk_size(vocab)
        assert size & (size - 1) == 0
        assert -(-vocab // size) <= vocab_chunks.MAX_CHUNKS


@pytest.mark.parametrize(
    "call",
    [
        lambda: sampler.sample(torch.zeros(4), inputs_of([])),
        lambda: sampler.sample(torch.zeros(2, 8), inputs_of([(1.0, -1, 1.0, 0.0, 0, 0)])),
        lambda: sampler.sample(
            torch.zeros(2, 8),
            inputs_of([(1.0, -1, 1.0, 0.0, 0, 0)] * 2),
            workspace=sampler.SamplingWorkspace.allocate(1, 8, DEVICE),
        ),
        lambda: sampler.sample(
            torch.zeros(1, 64),
            inputs_of([(1.0, -1, 1.0, 0.0, 0, 0)]),
            LogitAdjustments(RowMasks(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))),
        ),
    ],
)
def test_invalid_shapes_raise(call):
    with pytest.raises(ValueError, match=r"logits|rows|workspace|words"):
        call()
