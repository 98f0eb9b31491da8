"""The records that the kernels of one decoder step share.

They are tuples of arrays and integers, which compiled code passes by value; their field order is part of the
compiled code. Shapes: T tokens, R rows (sequences), C channels, F channels of the MLP, H query heads, G key heads of D
channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class QuantizedActivations(NamedTuple):
    """Activations [T, C] as matrix products read them: int8 in blocks of 32, or bfloat16 where `bf16_tiles` has rows.

    `bf16_tiles` has room for a multiple of 16 rows. Its memory holds the tiles that AMX registers load:
    [T / 16, C / 32, 16, 32].
    """

    quants: Any  # int8 [T, C]
    scales: Any  # float32 [T, C / 32]: value = scale * quant
    block_sums: Any  # float32 [T, C / 32]: the sum of a block's dequantized values
    half_sums: Any  # int32 [T, C / 32]: the sums of the first and the last 16 quants of a block, int16 each
    bf16_tiles: Any  # uint16 (bits of bfloat16) [T, C], or [0, C] for int8


class AttentionBatch(NamedTuple):
    """A step's sequences as arrays (`layout.AttentionLayout`), and the tiles that attention cuts them into."""

    positions: Any  # int32 [T]
    q_starts: Any  # int32 [R + 1]
    kv_starts: Any  # int32 [R + 1]
    first_pages: Any  # int32 [R], where a row's page table begins in `pages`
    pages: Any  # int32
    write_slots: Any  # int32 [T], negative: nothing is written
    tiles: Any  # int32 [tiles + 1], the first segment of each tile
    segments: Any  # int32, see `tiling.SEGMENT_FIELDS`
    split_starts: Any  # int32 [tiles + 1], the first KV split of each tile
    num_tiles: int
    page_shift: int  # a page holds 1 << page_shift tokens: dividing would take longer than reading a key


class HeadLayout(NamedTuple):
    """The heads of a model's attention."""

    q_per_kv: int  # query heads for each key head
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the scores
    softcap: float = 0.0  # a scaled score x becomes softcap * tanh(x / softcap); 0: it stays as it is


class LayerKvCache(NamedTuple):
    """One layer's KV cache: the addresses of its keys and of its values, which follow them in one piece of memory.

    A slot is bfloat16 [G, D], or int8 [G, D] and then float32 [G], the scales of the heads.
    """

    keys: int
    values: int
    window: int  # positions that a token sees, itself included
    slot_bytes: int
    scales: int  # offset of the scales in a slot of int8; 0: bfloat16


class RowUpdates(NamedTuple):
    """The adapters of a step's rows (`low_rank.row_updates`); without rows in `slots`, the step has none."""

    slots: Any  # int32 [T], the adapter of each row; -1: none
    table: Any  # int64 [adapters * rows_per_adapter, TABLE_COLUMNS]
    first: int  # the product, as a row of an adapter in the table
    rows_per_adapter: int
    terms: Any  # float32 [T, the most terms of a product, in whole tiles]


class PrefetchList(NamedTuple):
    """What a product of several rows prefetches beside its weights (`int8_kernel.ProductArgs`)."""

    address: int  # of the addresses of the pieces, int64 each
    length: int


QKV, OUTPUT, GATE_UP, DOWN, NUM_PRODUCTS = range(5)  # the products of a layer
HEAD, EMBEDDING, NUM_OUTER = range(3)  # those behind the layers
# Columns of `RowUpdates.table`, whose rows are the products of an adapter, one adapter after the other. `down`
# is a packed weight of the ranks: the address of its first tile, the bytes of one, their number, and the function of
# its layout. Then the address of the ranks' factors (float32), the term that is 1 (-1: none), and the address of a
# table of the product's tiles of outputs, int64 [tiles, TILE_COLUMNS]. Of the embedding, `down` is the address of the
# terms of each token, float32, the bytes from one token to the next, and 1.
DOWN_AT, DOWN_STRIDE, DOWN_TILES, DOWN_PRODUCT, FACTORS_AT, ONE_TERM, TILES_OF_UP, TABLE_COLUMNS = range(8)
# Of a tile of outputs: the first of its terms, their number (above 0), and the address of `up`, float16 [terms, 32].
FIRST_TERM, TERMS_OF_TILE, UP_AT, TILE_COLUMNS = range(4)


class ExpertBuffers(NamedTuple):
    """The intermediate results of a mixture of E experts, of which each token chooses K.

    The rows of `inputs`, `inner` and `out` are the pairs of a token and an expert, in the order of the experts.
    """

    scores: Any  # float32 [T, E], E rounded up to a multiple of 16
    chosen: Any  # int32 [T, K], the experts of a token
    weights: Any  # float32 [T, K], the factors of their outputs
    places: Any  # int32 [T, K], the rows of their pairs
    ends: Any  # int32 [E], the row behind each expert's last one
    active: Any  # int32 [1 + E]: the number of the experts that some token chose, and these experts
    inputs: QuantizedActivations  # [T K, C], int8
    inner: QuantizedActivations  # [T K, F], int8
    out: Any  # float32 [T K, C]


class StepBuffers(NamedTuple):
    """The intermediate results of a step."""

    residual: Any  # float32 [T, C]
    block_out: Any  # float32 [T, C], the output of attention or of the MLP before it is added to `residual`
    normed: Any  # float32 [T, C]; after the last layer, the step's result
    qkv: Any  # float32 [T, (H + 2 G) D]
    hidden: QuantizedActivations  # [T, C]
    attention_out: QuantizedActivations  # [T, H D]
    mlp_inner: QuantizedActivations  # [T, F]
