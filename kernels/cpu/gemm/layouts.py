"""The memory layouts of packed weights, one for each GGUF type.

A layout says how many bits a quant has, how an integer becomes a weight, and which inputs share a scale:

    weight = scale * (integer - offset)            or, with stored minima,      scale * integer + minimum

The integer is the quant, or the entry of a table at the quant. Scales and minima are float16 for 32 inputs, or, in a
superblock of 256 inputs, small integers for 32 or 16 inputs that are multiplied with one float16 of the superblock.
Such a product is exact in float32, so no layout rounds what the file holds.

A packed weight is [tiles, units] of units; a tile has 32 outputs, a unit 32 inputs or a superblock of 256:

    scale      32 float16
    minimum    32 float16, where there are minima
    and then for each block of 32 inputs
    quants     2 halves of 16 outputs x lines of 64 bytes
    scales     32 outputs x 1 or 2 bytes (absent where the unit has 32 inputs)
    minima     the same, where they are stored apart

This is the order in which a product reads them, so that a processor's own prefetcher sees one stream.

The layouts of floats (F32, F16, BF16) have neither integers nor scales. A line holds 2 inputs of 16 outputs, or one of
F32: the layout of a bfloat16 panel.

Otherwise a line holds 4 inputs of 16 outputs in bits 0 to `width` - 1 of its bytes, the 4 inputs after in the next
bits, and so on. Quants of 5 bits, for instance, are four lines of width 4 and one line of width 1 with the fifth bits.
"""

from __future__ import annotations

from typing import NamedTuple

QUANT_BLOCK = 32  # inputs of a block: those whose activations share a scale
SUPERBLOCK = 256  # inputs of a superblock
TILE_OUTPUTS = 32  # outputs of a tile
HALF_TILE = TILE_OUTPUTS // 2  # outputs whose quants lie side by side
LINE = 64  # bytes
GROUP_INPUTS = 4  # inputs that lie side by side in a line: VPDPBUSD adds their products
FLOAT_SCALES, BYTE_SCALES, PAIR_SCALES, NIBBLE_PAIR_SCALES = range(4)


class PackedLayout(NamedTuple):
    """One layout of packed weights.

    `widths`: the bits of a quant, lowest first, by the lines that hold them. `scaling`: FLOAT_SCALES, a float16 for 32
    inputs; BYTE_SCALES, a byte for 32 inputs; PAIR_SCALES, a byte for 16; NIBBLE_PAIR_SCALES, for 16 inputs a byte
    of the scale in its lower half and the minimum in its upper one. `signed_scales`: those bytes are signed.
    `is_bfloat16`: the scale's 16 bits are bfloat16. `table`: the integer of each quant, none negative. `is_float`: a
    "quant" is the weight itself, a float. `halves`: of a tile, those that are stored.
    """

    name: str
    widths: tuple[int, ...]
    scaling: int = FLOAT_SCALES
    offset: int = 0
    has_minima: bool = False
    signed_scales: bool = False
    is_bfloat16: bool = False
    table: tuple[int, ...] = ()
    is_float: bool = False
    halves: int = 2

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return HALF_TILE * self.halves

    @property
    def bits(self) -> int:
        """Bits of a quant."""
        return sum(self.widths)

    @property
    def max_integer(self) -> int:
        return max(self.table, default=2**self.bits - 1)

    @property
    def unit_inputs(self) -> int:
        return QUANT_BLOCK if self.scaling == FLOAT_SCALES else SUPERBLOCK

    @property
    def blocks(self) -> int:
        """Blocks of 32 inputs in a unit."""
        return self.unit_inputs // QUANT_BLOCK

    @property
    def has_pairs(self) -> bool:
        """Whether 16 inputs share a scale, so that a block has two."""
        return self.scaling in (PAIR_SCALES, NIBBLE_PAIR_SCALES)

    @property
    def half_bytes(self) -> int:
        """Bytes of a block's quants of 16 outputs."""
        return QUANT_BLOCK * HALF_TILE * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale, or the scales, of an output and a block in a superblock."""
        return (0, 1, 2, 2)[self.scaling]

    @property
    def minima_bytes(self) -> int:
        """Bytes of an output's minima of a block in a superblock that are stored apart from the scales."""
        return self.scale_bytes if self.has_minima and self.scaling != NIBBLE_PAIR_SCALES else 0

    @property
    def float16_numbers(self) -> int:
        """The float16 of an output at the beginning of a unit: scale and minimum."""
        return 0 if self.is_float else 1 + self.has_minima

    @property
    def blocks_offset(self) -> int:
        """Where the blocks of a unit begin, behind its float16 scales and minima."""
        return 2 * TILE_OUTPUTS * self.float16_numbers

    @property
    def scales_offset(self) -> int:
        """Where the scales of a block begin in it."""
        return self.halves * self.half_bytes

    @property
    def minima_offset(self) -> int:
        """Where the minima of a block begin in it."""
        return self.scales_offset + TILE_OUTPUTS * self.scale_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 32 outputs."""
        return self.minima_offset + TILE_OUTPUTS * self.minima_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of 32 outputs."""
        return self.blocks_offset + self.block_bytes * self.blocks

    @property
    def output_bytes(self) -> int:
        """Bytes of one output in a unit."""
        return self.unit_bytes // TILE_OUTPUTS


_IQ4_TABLE = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)  # ggml's kvalues_iq4nl + 128
_FP4_TABLE = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # twice the numbers of E2M1, + 12

LAYOUTS = {
    layout.name: layout
    for layout in (
        PackedLayout("Q4_0", (4,), offset=8),
        PackedLayout("Q4_1", (4,), has_minima=True),
        PackedLayout("Q5_0", (4, 1), offset=16),
        PackedLayout("Q5_1", (4, 1), has_minima=True),
        PackedLayout("Q8_0", (8,), offset=128),
        PackedLayout("Q2_K", (2,), NIBBLE_PAIR_SCALES, has_minima=True),
        PackedLayout("Q3_K", (2, 1), PAIR_SCALES, offset=4, signed_scales=True),
        PackedLayout("Q4_K", (4,), BYTE_SCALES, has_minima=True),
        PackedLayout("Q5_K", (4, 1), BYTE_SCALES, has_minima=True),
        PackedLayout("Q6_K", (4, 2), PAIR_SCALES, offset=32, signed_scales=True),
        PackedLayout("IQ4_NL", (4,), offset=128, table=_IQ4_TABLE),
        PackedLayout("IQ4_XS", (4,), BYTE_SCALES, offset=128, signed_scales=True, table=_IQ4_TABLE),
        PackedLayout("MXFP4", (4,), offset=12, is_bfloat16=True, table=_FP4_TABLE),
        PackedLayout("F16", (16,), is_float=True),
        PackedLayout("BF16", (16,), is_float=True),
        PackedLayout("F32", (32,), is_float=True),
    )
}
# `down` of adapters, whose ranks, often 16 or fewer, would not fill whole tiles.
DOWN_LAYOUT = LAYOUTS["Q8_0"]._replace(name="Q8_0-half", halves=1)
DOWN_OUTPUTS = DOWN_LAYOUT.outputs
