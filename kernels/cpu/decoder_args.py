"""The interface between `decoder` and its compiled kernels: which entry of the arguments holds what.

The kernels take one int64 matrix (`kernel_args.KernelArgs`); each entry describes one array. Sizes are named as in
`kernel_types`.
"""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu.gemm.packed_linear import PART_COLUMNS
from plait.kernels.cpu.kernel_args import float32_matrix, int8_matrix, int32_matrix, uint16_matrix
from plait.kernels.cpu.kernel_types import QuantizedActivations
from plait.kernels.cpu.parallel.threads import ThreadContext

# Entries of `forward`. The step's tokens and sequences:
TOKENS, POSITIONS, Q_STARTS, KV_STARTS, FIRST_PAGES, PAGES, WRITE_SLOTS, TILES, SEGMENTS = range(9)
# `kernel_types.StepBuffers`; quantized activations take five entries each, in the order of their fields:
RESIDUAL, BLOCK_OUT, NORMED, QKV_OUT = range(9, 13)
HIDDEN, ATTENTION_OUT, MLP_INNER = 13, 18, 23
BF16_TILES = 4  # offset of `QuantizedActivations.bf16_tiles` within its five entries
# The model; EMBEDDING is one part of a weight (`packed_linear`):
LAYERS, FINAL_NORM, EMBEDDING, COS, SIN, SETTINGS, EMBEDDING_SCALE, SCORE_SCALE, EPS = range(28, 37)
# One row for each thread:
WORKSPACES, GATE_UP_BUFFERS, COUNTERS, AMX_SCRATCH = range(37, 41)
# Attention's KV splits:
SPLIT_STARTS, PARTIALS, FINISHED_SPLITS = range(41, 44)
# `kernel_types.ExpertBuffers`, absent without experts. GROUPS has a row for each layer of each row partition, so that a
# late thread finds the numbers of its own layer. Each of the last two takes five entries:
EXPERT_COUNTERS, SCORES, CHOSEN, WEIGHTS, PLACES, GROUPS, EXPERT_OUT = range(44, 51)
EXPERT_INPUTS, EXPERT_INNER = 51, 56
SOFT_CAP = 61  # of scores; 0: none
# `kernel_types.RowUpdates`; ADAPTER_SLOTS has no rows in a step without adapters:
ADAPTER_SLOTS, ADAPTER_TABLE, ADAPTER_TERMS = range(62, 65)
CAPTURED = 65  # [T, captured layers * C]: the residual before these layers; no rows if none is captured
ENTRIES = 66

# Columns of LAYERS, one row for each layer: weights in parts (`packed_linear`), three of q, k and v, one of the output,
# gate and up, one of down; then addresses (0: absent) and numbers. With a router, gate, up and down have the outputs of
# all experts, one after the other.
QKV, OUTPUT, GATE_UP, DOWN = 0, 3 * PART_COLUMNS, 4 * PART_COLUMNS, 6 * PART_COLUMNS
NORM = 7 * PART_COLUMNS
POST_NORM, MLP_NORM, POST_MLP_NORM, HEAD_NORMS, BIAS, ROUTER, WINDOW, ROPE_TABLE = range(NORM + 1, NORM + 9)
CAPTURE = NORM + 9  # 1 for the layer whose input is captured first, and so on; 0: it is not captured

# Columns of SETTINGS. Set once for a model, up to PAGE_SHIFT, then for each step:
(
    Q_PER_KV,
    NUM_KV_HEADS,
    HEAD_DIM,
    ACTIVATION,
    TILE_TOKENS,
    WORKSPACE_LANES,
    NUM_EXPERTS,
    NORMALIZE_TOPK,
    JOINT_HEAD_NORMS,
    PAGE_SHIFT,
    KV_CACHE,
    KV_CACHE_STRIDE,
    KV_SLOT_BYTES,
    KV_SCALES,
    ATTENTION_ISA,
) = range(15)
# Written by the kernel itself, but for NUM_PARTITIONS:
NUM_TILES, NUM_PARTITIONS, SPLIT_KV, KV_HEADS_PER_ITEM, TILE_LANES = range(15, 20)
NUM_SETTINGS = 20

# Entries of `compute_logits`; HEAD_ACTIVATIONS takes five.
HEAD_IN, HEAD_OUT, HEAD_ACTIVATIONS = range(3)
HEAD_COUNTERS, HEAD_AMX_SCRATCH, HEAD_ARGMAX, HEAD_SETTINGS, HEAD_SOFT_CAP = range(7, 12)
# `kernel_types.RowUpdates`; HEAD_ADAPTER_SLOTS has no rows if no adapter changes the head:
HEAD_ADAPTER_SLOTS, HEAD_ADAPTER_TABLE, HEAD_ADAPTER_TERMS = range(12, 15)
HEAD_ENTRIES = 15
# Columns of HEAD_SETTINGS after the weight's part: its outputs without padding, and the layers of the model.
HEAD_OUTPUTS, HEAD_LAYERS, NUM_HEAD_SETTINGS = range(PART_COLUMNS, PART_COLUMNS + 3)
QUANTIZE, HEAD_DOWN, HEAD_PRODUCT, FINISH, HEAD_PHASES = range(5)

# Phases of a layer, as offsets from its first. Attention is counted by all partitions on the first one's counters, and
# the products with the `down` of adapters only take place in steps with adapters, CAPTURE_INPUT in captured layers.
(
    PRE_NORM,
    CAPTURE_INPUT,
    QKV_DOWN,
    QKV_PRODUCT,
    ROPE,
    ATTENTION,
    OUTPUT_DOWN,
    OUTPUT_PRODUCT,
    PRE_MLP_NORM,
    GATE_UP_DOWN,
    GATE_UP_PRODUCT,
    DOWN_DOWN,
    DOWN_PRODUCT,
    PHASES_PER_LAYER,
) = range(14)


def num_phases(layers: int) -> int:
    """Phases of one row partition: the embedding, those of each layer, and the final norm."""
    return 2 + PHASES_PER_LAYER * layers


def thread_context(thread_id: int, threads: int, args: Any, counters: int, scratch: int) -> ThreadContext:
    """A thread's part in a kernel, whose counters and AMX scratch are these entries of its arguments."""
    address = args[scratch, 0]
    return ThreadContext(
        thread_id, threads, args[counters, 0], address + thread_id * args[scratch, 2] if address else 0
    )


def activations_at(args: Any, entry: int) -> Any:
    """The `QuantizedActivations` in the five entries from `entry` on."""
    return QuantizedActivations(
        int8_matrix(args, entry),
        float32_matrix(args, entry + 1),
        float32_matrix(args, entry + 2),
        int32_matrix(args, entry + 3),
        uint16_matrix(args, entry + BF16_TILES),
    )
