"""The layers of pipeline stages: all of them, in order, as equal numbers of weights as possible."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig, MoEConfig
from plait.runtime.models.pipeline_stages import _even_ends, layer_weights, split_layers
from plait.runtime.weights.checkpoint import expected_shapes

CONFIG = ModelConfig(
    architecture="qwen3_moe",
    vocab_size=40,
    hidden_size=8,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=12,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    context_length=64,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 8))
def test_parts_have_the_smallest_sum_of_squares(counts, size):
    size = min(size, len(counts))
    ends = _even_ends(counts, size)
    assert len(ends) == size and ends[-1] == len(counts) and all(a < b for a, b in itertools.pairwise([0, *ends]))

    def cost(ends):
        return sum(sum(counts[a:b]) ** 2 for a, b in itertools.pairwise([0, *ends]))

    others = itertools.combinations(range(1, len(counts)), size - 1)
    assert cost(ends) == min(cost([*other, len(counts)]) for other in others)


@pytest.mark.parametrize("tied", [True, False])
def test_all_weights_are_counted_once_and_a_tied_embedding_twice(tied):
    experts = MoEConfig(4, 2, 6, True, (False, True, True, True, True, True))
    config = replace(CONFIG, tie_word_embeddings=tied, experts=experts)
    counts = layer_weights(config)
    total = sum(math.prod(shape) for shape in expected_shapes(config).values())
    assert sum(counts) == total + tied * config.vocab_size * config.hidden_size
    vocabulary = config.vocab_size * config.hidden_size
    assert counts[0] < counts[1] + vocabulary  # the first layer has an MLP, the second one experts
    assert counts[-1] == counts[1] + vocabulary + config.hidden_size


def test_stages_have_all_layers_in_order():
    for size in range(1, 7):
        stages = split_layers(CONFIG, size)
        assert [layer for stage in stages for layer in stage.layers] == list(range(6))
        assert [stage.is_first for stage in stages] == [True] + [False] * (size - 1)
        assert [stage.is_last for stage in stages] == [False] * (size - 1) + [True]


def test_embedding_and_head_count():
    large = replace(CONFIG, vocab_size=4000)  # several times the weights of a layer
    assert [len(stage.layers) for stage in split_layers(large, 3)] == [1, 4, 1]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="pipeline_parallel_size=7: the model has 6 layers, and every stage needs"):
        split_layers(CONFIG, 7)
    with pytest.raises(InputError, match="the model has 1 layer, and"):
        split_layers(replace(CONFIG, num_layers=1), 2)
