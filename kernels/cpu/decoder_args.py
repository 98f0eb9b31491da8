"""The interface between `decoder` and the compiled `decoder_kernels`: which entry of the arguments holds what.

The kernels take one int64 matrix (`kernel_args.KernelArgs`); each entry describes one array. Sizes are named as in
`kernel_types`.
"""

from __future__ import annotations

from plait.kernels.cpu.jit import inner_njit

# Entries of `forward`. The step's tokens and sequences:
TOKENS, POSITIONS, Q_STARTS, KV_STARTS, FIRST_PAGES, PAGES, WRITE_SLOTS, TILES, SEGMENTS = range(9)
# `kernel_types.StepBuffers`; quantized activations take four entries each, in the order of their fields:
RESIDUAL, BLOCK_OUT, NORMED, QKV_OUT = range(9, 13)
HIDDEN, ATTENTION_OUT, MLP_INNER = 13, 17, 21
BF16_TILES = 3  # offset of `QuantizedActivations.bf16_tiles` within its four entries
# The model:
LAYERS, FINAL_NORM, EMBEDDING, COS, SIN, SETTINGS, EMBEDDING_SCALE, SCORE_SCALE, EPS = range(25, 34)
# One row for each thread:
WORKSPACES, GATE_UP_BUFFERS, COUNTERS, AMX_SCRATCH = range(34, 38)
# Attention's KV splits:
SPLIT_STARTS, PARTIALS, FINISHED_SPLITS = range(38, 41)
ENTRIES = 41

# Columns of LAYERS, one row for each layer: addresses (0: absent), bits of weights, and numbers.
QKV, QKV_BITS, OUTPUT, OUTPUT_BITS, GATE_UP, GATE_UP_BITS, DOWN, DOWN_BITS = range(8)
NORM, POST_NORM, MLP_NORM, POST_MLP_NORM, HEAD_NORMS, BIAS, WINDOW, ROPE_TABLE = range(8, 16)

# Columns of SETTINGS. Set once for a model, up to PAGE_SHIFT, then for each step:
(
    EMBEDDING_BITS,
    Q_PER_KV,
    NUM_KV_HEADS,
    HEAD_DIM,
    ACTIVATION,
    TILE_TOKENS,
    WORKSPACE_LANES,
    ATTENTION_ISA,
    PAGE_SHIFT,
    KV_CACHE,
    KV_CACHE_STRIDE,
) = range(11)
# Written by the kernel itself, but for NUM_PARTITIONS:
NUM_TILES, NUM_PARTITIONS, SPLIT_KV, KV_HEADS_PER_ITEM, TILE_LANES = range(11, 16)
NUM_SETTINGS = 16

# Entries of `compute_logits`; HEAD_ACTIVATIONS takes four.
HEAD_IN, HEAD_OUT, HEAD_ACTIVATIONS = range(3)
HEAD_WEIGHT, HEAD_COUNTERS, HEAD_AMX_SCRATCH, HEAD_ARGMAX, HEAD_SETTINGS = range(6, 11)
HEAD_ENTRIES, HEAD_PHASES = 11, 3
HEAD_BITS, HEAD_OUTPUTS = range(2)  # columns of HEAD_SETTINGS: bits of the weights, outputs without padding

PHASES_PER_LAYER = 8  # the fourth is attention, which all partitions count on the first partition's counters


@inner_njit
def num_phases(layers: int) -> int:
    """Phases of one row partition: the embedding, those of each layer, and the final norm."""
    return 2 + PHASES_PER_LAYER * layers
