"""The parts that ranks read of a checkpoint: together they are the weights, and each is read alone."""

import itertools
import os

import numpy as np
import pytest
import torch
from example_share import sample_of
from family_cases import FAMILY_CASES, GGUF_CASES, MODEL_CASES, case_id
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from quantized_checkpoints import CASES, save_quantized
from tiny_hf_models import randomized, write_gguf

from plait.kernels.quantized_matrix import Grid, QuantizedMatrix, dequantize, select_output_grid
from plait.runtime.errors import InputError
from plait.runtime.models.checkpoint_interface import WeightPart
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.weight_split import INPUTS, Rank, WeightSplit, rank_config
from plait.runtime.weights import stored_rows
from plait.runtime.weights.checkpoint import expected_shapes, open_checkpoint
from plait.runtime.weights.rank_checkpoint import RankCheckpoint
from plait.runtime.weights.stored_rows import read_rows


def ranks_of(path, size):
    return [RankCheckpoint(open_checkpoint(path), Rank(index, size)) for index in range(size)]


def joined(whole, ranks, name):
    """The parts of all ranks put together as the whole weight; a KV head of several ranks is taken once."""
    parts = [rank.tensor(name, torch.float32, "cpu") for rank in ranks]
    if parts[0].shape == whole.shape:
        if name.endswith(("o_proj.bias", "down_proj.bias")):  # of a row-parallel layer: the sum has it once
            return sum(parts)
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    axis = next(a for a in range(whole.dim()) if parts[0].shape[a] != whole.shape[a])
    fused = {"qkv_proj": 3, "gate_up_proj": 2}.get(name.split(".")[-2], 1)
    if fused == 1:
        groups = itertools.groupby(parts, key=lambda part: part.numpy().tobytes())
        distinct = [next(group) for _, group in groups]
        return torch.cat(distinct, dim=axis)
    return None  # compared by `test_fused_matrices_are_split_block_by_block`


def part_or_reason(rank, name):
    """(the rank's part of a quantized matrix, "") or (None, why it is refused)."""
    try:
        return QuantizedMatrix(rank.grid(name), rank.codes(name, "cpu").numpy()), ""
    except InputError as error:
        return None, str(error)


def assert_parts_make_the_weights(path, size):
    whole, ranks = open_checkpoint(path), ranks_of(path, size)
    for name in whole.names():
        weight = whole.tensor(name, torch.float32, "cpu")
        together = joined(weight, ranks, name)
        assert together is None or torch.equal(together, weight), name
    held = {name: rank.tensor(name, torch.float32, "cpu").shape for rank in ranks[:1] for name in whole.names()}
    assert {name: tuple(shape) for name, shape in held.items() if "embed" not in name and "lm_head" not in name} == {
        name: shape
        for name, shape in expected_shapes(ranks[0].config).items()
        if "embed" not in name and "lm_head" not in name
    }


@pytest.mark.parametrize("case", MODEL_CASES, ids=case_id)
def test_parts_of_safetensors_make_the_weights(case, tmp_path):
    family, variant = case
    randomized(FAMILY_CASES[family].build(variant)).save_pretrained(tmp_path)
    assert_parts_make_the_weights(tmp_path, 2)


@pytest.mark.parametrize("case", GGUF_CASES, ids=case_id)
def test_parts_of_gguf_files_make_the_weights(case, tmp_path):
    family, variant = case
    write_gguf(randomized(FAMILY_CASES[family].build(variant)), tmp_path / "model.gguf")
    assert_parts_make_the_weights(tmp_path / "model.gguf", 2)


def test_fused_matrices_are_split_block_by_block(tmp_path):
    model = randomized(FAMILY_CASES["phi3"].build())
    model.save_pretrained(tmp_path)
    second = ranks_of(tmp_path, 2)[1].tensor("model.layers.0.self_attn.qkv_proj.weight", torch.float32, "cpu")
    qkv = model.model.layers[0].self_attn.qkv_proj.weight.data  # 4 query heads, 2 of keys and 2 of values, of 16 rows
    assert torch.equal(second, torch.cat([qkv[32:64], qkv[80:96], qkv[112:128]]))
    second = ranks_of(tmp_path, 2)[1].tensor("model.layers.0.mlp.gate_up_proj.weight", torch.float32, "cpu")
    gate, up = model.model.layers[0].mlp.gate_up_proj.weight.data.chunk(2)
    assert torch.equal(second, torch.cat([gate[48:], up[48:]]))


def test_products_of_integers_are_exact(tmp_path):
    """Outputs side by side, and the sum of the row-parallel parts, are the products of the whole weights."""
    model = FAMILY_CASES["llama"].build("MHA, untied, biases")
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-9, 10, parameter.shape, generator=chance))
    model.save_pretrained(tmp_path)
    whole, ranks = open_checkpoint(tmp_path), ranks_of(tmp_path, 4)
    for name, shape in expected_shapes(whole.config).items():
        module = name.removesuffix(".weight").partition("layers.0.")[2]
        if len(shape) < 2 or not module:
            continue
        x = torch.randint(-9, 10, (5, shape[1]), generator=chance).float()
        parts = [rank.tensor(name, torch.float32, "cpu") for rank in ranks]
        if module in INPUTS:
            products = [cut @ part.T for cut, part in zip(x.chunk(4, dim=1), parts, strict=True)]
            product = sum(products)
        else:
            product = torch.cat([x @ part.T for part in parts], dim=1)
        assert torch.equal(product, x @ whole.tensor(name, torch.float32, "cpu").T), name


@pytest.mark.parametrize("case", sample_of(list(CASES), least=9))
def test_parts_of_quantized_safetensors_make_the_weights(case, tmp_path):
    save_quantized(tmp_path, CASES[case])
    assert_parts_make_the_weights(tmp_path, 2)


@pytest.mark.parametrize("case", CASES)
def test_quantized_matrices_are_split_or_refused_by_name(case, tmp_path):
    save_quantized(tmp_path, CASES[case])
    whole, ranks = open_checkpoint(tmp_path), ranks_of(tmp_path, 2)
    for name in whole.names():
        if whole.grid(name) is None:
            assert all(rank.grid(name) is None for rank in ranks)
            continue
        for rank in ranks:
            part, reason = part_or_reason(rank, name)
            if part is not None:
                assert np.array_equal(dequantize(part), rank.tensor(name, torch.float32, "cpu").numpy())
            else:
                assert f": {name} is stored" in reason and "do not end where its blocks end" in reason
                assert name.removesuffix(".weight").partition("layers.")[2].partition(".")[2] in INPUTS


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=3))
def test_outputs_of_a_grid_keep_their_blocks_unless_a_border_cuts_one(block, ranges):
    """Products of fp8 are faster where a tile's outputs share scales."""
    chance, outputs = np.random.default_rng(3), 11
    ranges = [tuple(sorted(borders)) for borders in ranges]
    assume(any(first < end for first, end in ranges))
    codes = chance.integers(0, 126, (outputs, 6)).astype(np.uint8)
    grid = Grid("e4m3", chance.random((-(-outputs // block), 2), np.float32), 3, row_block=block)
    rows = np.concatenate([np.arange(first, end) for first, end in ranges])
    part = select_output_grid(grid, outputs, ranges)
    found = dequantize(QuantizedMatrix(part, codes[rows]))
    assert np.array_equal(found, dequantize(QuantizedMatrix(grid, codes))[rows])
    borders = [first for first, _ in ranges] + [end for _, end in ranges[:-1]]
    assert part.row_block == (block if all(border % block == 0 for border in borders) else 1)


@pytest.mark.parametrize("case", sample_of(list(CASES), least=9))
def test_codes_of_any_part_are_slices_on_any_device(case, tmp_path):
    """Bytes in torch's memory, as on a GPU, and in numpy's are unpacked alike, whichever words a part cuts."""
    save_quantized(tmp_path, CASES[case])
    whole, chance = open_checkpoint(tmp_path), np.random.default_rng(5)
    for name in (name for name in whole.names() if whole.grid(name) is not None):
        outputs, inputs = whole.shapes[name]
        complete = whole.codes(name, "cpu").numpy()
        for _ in range(3):
            rows = tuple(tuple(sorted(chance.integers(0, outputs + 1, 2).tolist())) for _ in range(2))
            columns = tuple(sorted(chance.integers(0, inputs + 1, 2).tolist()))
            part = WeightPart(rows, columns)
            expected = np.concatenate([complete[first:end] for first, end in rows])[:, slice(*columns)]
            assert np.array_equal(whole.codes(name, "cpu", part).numpy(), expected)
            unpacked = whole._quantized.codes(name, lambda stored: torch.from_numpy(read_rows(stored)), part)
            assert np.array_equal(torch.cat(unpacked).numpy(), expected)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q5_1"])
def test_gguf_blocks_are_cut_only_where_they_are_dequantized(quantization, tmp_path):
    """160 inputs are five blocks: each rank's 80 end within one."""
    path = tmp_path / "model.gguf"
    write_gguf(randomized(FAMILY_CASES["llama"].build(intermediate_size=160)), path, quantization)
    assert_parts_make_the_weights(path, 2)
    rank = ranks_of(path, 2)[1]
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(InputError, match=f"{name} is stored as {quantization}, and 2 parts of its 160 inputs"):
        rank.raw_blocks(name)
    stored_type, blocks, shape = rank.raw_blocks("model.layers.0.self_attn.o_proj.weight")
    assert stored_type == quantization and shape == (64, 32) and blocks.flags.c_contiguous


def bytes_read(monkeypatch, read):
    """How many bytes of files `read` reads."""
    counts = []
    preadv = os.preadv

    def counted(*arguments):
        counts.append(preadv(*arguments))
        return counts[-1]

    with monkeypatch.context() as patch:
        patch.setattr(stored_rows.os, "preadv", counted)
        read()
    return sum(counts)


def test_a_rank_reads_only_its_rows_and_columns(tmp_path, monkeypatch):
    """Split by outputs, by inputs and into fused blocks; the weights that are not split are complete in each rank."""
    randomized(FAMILY_CASES["phi3"].build()).to(torch.bfloat16).save_pretrained(tmp_path)
    for rank in ranks_of(tmp_path, 2):
        for name in rank.names():
            part = rank.tensor(name, torch.bfloat16, "cpu")
            if part.shape != rank._full_shapes[name]:
                count = bytes_read(monkeypatch, lambda name=name, rank=rank: rank.tensor(name, torch.bfloat16, "cpu"))
                assert count == part.numel() * 2


@pytest.mark.parametrize("case", sample_of(list(CASES), least=9))
def test_a_rank_reads_only_its_codes(case, tmp_path, monkeypatch):
    """Of quantized matrices; a word that the ranks' border cuts is read by both."""
    save_quantized(tmp_path, CASES[case])
    whole = open_checkpoint(tmp_path)
    for name in (name for name in whole.names() if whole.grid(name) is not None):
        complete = bytes_read(monkeypatch, lambda name=name: whole.codes(name, "cpu"))
        parts = [bytes_read(monkeypatch, lambda r=rank, n=name: r.codes(n, "cpu")) for rank in ranks_of(tmp_path, 2)]
        assert parts == [complete // 2] * 2, name


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "F16"])
def test_a_rank_reads_only_its_blocks(quantization, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(randomized(FAMILY_CASES["llama"].build(intermediate_size=128)), path, quantization)
    whole = open_checkpoint(path)
    for name, shape in whole.shapes.items():
        if len(shape) == 2:
            complete = len(whole.file.tensor_bytes(whole._gguf_name(name)))
            for rank in ranks_of(path, 2):
                count = bytes_read(monkeypatch, lambda n=name, r=rank: r.read_blocks(n, "cpu"))
                assert count == pytest.approx(complete / 2, rel=0.02), name  # a vocabulary of 97 tokens


SIZES = dict(
    architecture="qwen3_moe",
    vocab_size=100,
    hidden_size=64,
    num_layers=2,
    num_heads=12,
    num_kv_heads=6,
    head_dim=16,
    intermediate_size=96,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    context_length=64,
)


@pytest.mark.parametrize(
    ("size", "changes", "reason"),
    [
        (5, {}, "12 attention heads cannot be divided among 5 ranks; 1, 2, 3, 4, 6, 12 divide them"),
        (24, {}, "12 attention heads cannot be divided among 24 ranks"),  # more ranks than heads
        (4, {}, "6 KV heads can neither be divided among 4 ranks nor replicated equally"),
        (2, {"intermediate_size": 97}, "MLP of width 97 cannot be divided among 2 ranks"),
        (6, {"vocab_size": 5}, "a vocabulary of 5 tokens is too small"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size, changes, reason):
    with pytest.raises(InputError, match=reason):
        rank_config(ModelConfig(**SIZES | changes), size)


def test_kv_heads_are_replicated_where_there_are_fewer_than_ranks():
    config = ModelConfig(**SIZES | {"num_kv_heads": 2})
    assert rank_config(config, 4).num_kv_heads == 1
    full, local = expected_shapes(config), expected_shapes(rank_config(config, 4))
    parts = [WeightSplit(config, Rank(i, 4), full, local).parts for i in range(4)]
    name = "model.layers.0.self_attn.k_proj.weight"
    assert [part[name].outputs for part in parts] == [((0, 16),), ((0, 16),), ((16, 32),), ((16, 32),)]


def test_a_family_without_rules_is_refused():
    config = ModelConfig(**SIZES)
    full, local = expected_shapes(config), expected_shapes(rank_config(config, 2))
    full["model.layers.0.self_attn.other_proj.weight"] = (192, 64)
    local["model.layers.0.self_attn.other_proj.weight"] = (96, 64)
    with pytest.raises(InputError, match=r"no rule for 'model.layers.0.self_attn.other_proj.weight' of .* qwen3_moe"):
        WeightSplit(config, Rank(0, 2), full, local)
