"""Forward passes of every family against transformers on tiny random checkpoints, in float32 to 1e-4."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from family_cases import FAMILY_CASES, GGUF_CASES, LONGROPE, MODEL_CASES, case_id
from tiny_hf_models import (
    all_hidden_states,
    all_logits,
    assert_chunks_equal,
    assert_rows_over_a_prefix_equal,
    randomized,
    run,
    runner,
    text,
    transformers_logits,
    write_gguf,
)

from plait.runtime.errors import InputError
from plait.runtime.models.registry import config_from_gguf
from plait.runtime.weights.checkpoint import open_checkpoint


@pytest.fixture(params=MODEL_CASES, ids=case_id, scope="module")
def pair(request, tmp_path_factory):
    """transformers' model and plait's runner on one checkpoint."""
    family, variant = request.param
    model = randomized(FAMILY_CASES[family].build(variant))
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return SimpleNamespace(reference=model, ours=runner(folder))


def test_prefill_equals_transformers(pair):
    tokens = text(60, 0)
    (ours,) = run(pair.ours, [(tokens, range(60), 0, 60, 0)])
    torch.testing.assert_close(ours, transformers_logits(pair.reference, tokens), atol=1e-4, rtol=1e-4)


def test_chunks_and_decode_equal_transformers(pair):
    assert_chunks_equal(pair.ours, pair.reference)


def test_a_ragged_batch_over_a_shared_prefix_equals_transformers(pair):
    assert_rows_over_a_prefix_equal(pair.ours, pair.reference)


def test_a_row_can_read_kv_that_another_row_writes_in_the_same_step(pair):
    """`PrefixCache.publish_early` relies on this."""
    prefix, tail = text(20, 4), text(5, 5)
    tokens = prefix + tail
    rows = [(prefix, range(20), 0, 20, 19), (tokens, range(25), 20, 5, 24)]
    together = run(pair.ours, rows)[1]
    torch.testing.assert_close(together, transformers_logits(pair.reference, tokens)[-1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_hidden_states_of_a_model_without_output_head_equal_transformers(family, tmp_path):
    """Embedding models are saved as the class without the head, whose weights have shorter names."""
    model = randomized(FAMILY_CASES[family].build())
    model.model.save_pretrained(tmp_path)
    tokens = text(60, 0)
    with torch.no_grad():
        expected = model.model(torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(all_hidden_states(runner(tmp_path), tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family_and_variant", GGUF_CASES, ids=case_id)
def test_gguf_logits_equal_transformers(family_and_variant, tmp_path):
    family, variant = family_and_variant
    model = randomized(FAMILY_CASES[family].build(variant))
    write_gguf(model, tmp_path / "m.gguf")
    tokens = text(60, 0)
    ours = all_logits(runner(tmp_path / "m.gguf"), tokens)
    torch.testing.assert_close(ours, transformers_logits(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_longrope_frequencies_follow_the_context_length_of_the_runner(container, tmp_path):
    phi3 = FAMILY_CASES["phi3"]
    model = randomized(phi3.build(original_max_position_embeddings=32, rope_parameters=LONGROPE))
    path = tmp_path if container == "safetensors" else tmp_path / "m.gguf"
    model.save_pretrained(path) if container == "safetensors" else write_gguf(model, path)
    long, short = text(60, 0), text(30, 1)
    ours = runner(path)
    torch.testing.assert_close(all_logits(ours, long), transformers_logits(model, long), atol=1e-4, rtol=1e-4)
    # Also in chunks of which the first is short: the cached KV must fit the later chunks.
    run(ours, [(long, range(60), 0, 20, 19)])
    (rest,) = run(ours, [(long, range(60), 20, 40, 20)])
    torch.testing.assert_close(rest, transformers_logits(model, long)[20:], atol=1e-4, rtol=1e-4)
    limited = runner(path, context_length=32)
    torch.testing.assert_close(all_logits(limited, short), transformers_logits(model, short), atol=1e-4, rtol=1e-4)


def test_gguf_sliding_window_pattern_is_a_period_or_a_list(tmp_path):
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    model = randomized(FAMILY_CASES["gemma3"].build(num_hidden_layers=3, layer_types=kinds))
    write_gguf(model, tmp_path / "m.gguf")
    metadata = dict(open_checkpoint(tmp_path / "m.gguf").file.metadata)
    pattern = "gemma3.attention.sliding_window_pattern"
    assert config_from_gguf(metadata).sliding_layers == (True,) * 3  # the default: every sixth layer has full attention
    assert config_from_gguf(metadata | {pattern: 2}).sliding_layers == (True, False, True)
    assert config_from_gguf(metadata | {pattern: np.array([False, True, True])}).sliding_layers == (False, True, True)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_rejects_float16(family, tmp_path):
    randomized(FAMILY_CASES[family].build()).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="float16"):
        runner(tmp_path, dtype="float16")


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "gemma3", "phi3", "olmo2"])
def test_bfloat16_stays_near_float32(family, tmp_path):
    """A norm or weight rounded at the wrong point would make the error larger than that of transformers."""
    model = randomized(FAMILY_CASES[family].build())
    model.save_pretrained(tmp_path)
    tokens = text(40, 2)
    exact = transformers_logits(model, tokens)
    ours = all_logits(runner(tmp_path, dtype="bfloat16", weights="bf16"), tokens)
    rounded = transformers_logits(model.to(torch.bfloat16), tokens).float()
    assert (ours - exact).norm() < 1.2 * (rounded - exact).norm() + 1e-3


@pytest.mark.torch_threads
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "gemma3", "olmo2"])
def test_deterministic_logits_do_not_depend_on_the_batch(family, tmp_path):
    randomized(FAMILY_CASES[family].build()).save_pretrained(tmp_path)
    ours = runner(tmp_path, deterministic=True)
    tokens, other = text(30, 5), text(25, 6)
    single = all_logits(ours, tokens)
    pages, others = range(30), range(100, 125)
    run(ours, [(tokens, pages, 0, 11, 10), (other, others, 0, 25, 24)])
    (pieces, _) = run(ours, [(tokens, pages, 11, 19, 11), (other, others, 0, 25, 24)])
    assert torch.equal(pieces, single[11:])
