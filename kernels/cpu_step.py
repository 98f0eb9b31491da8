"""A decoder's whole step in one parallel region: the order of its phases, and the output head's.

Knows: the phases, and where a model's weights lie. Must not know: files, torch, sessions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_amx
from plait.kernels.cpu_attend import attend
from plait.kernels.cpu_cache import STAMP, kept
from plait.kernels.cpu_parts import (
    Heads,
    Rounded,
    Rows,
    Team,
    add_and_norm,
    portion,
    round_blocks,
    turn_and_keep,
)
from plait.kernels.cpu_peaks import search
from plait.kernels.cpu_plan import bytes_, doubles, floats, halves, ints, number, table
from plait.kernels.cpu_products import gated_product, product
from plait.kernels.cpu_rows import address_of, half_to_float
from plait.kernels.cpu_share import share_out
from plait.kernels.cpu_team import claim, finish, wait
from plait.kernels.cpu_tile import BLOCK, HALF, WIDTH

GATE_ROWS = 2 * cpu_amx.ROWS  # rows of gate and up that are held before they are multiplied

# Columns of `Model.layers`: addresses (0: there is none), bits, and numbers of one layer.
QKV, QKV_BITS, OUTPUT, OUTPUT_BITS, GATED, GATED_BITS, DOWN, DOWN_BITS = range(8)
NORM, POST_NORM, MLP_NORM, POST_MLP_NORM, HEAD_NORMS, BIAS, WINDOW, ROTATION = range(8, 16)
COLUMNS = 16
PHASES = 8  # of one layer


# Entries of the plan. A step's own:
TOKENS, POSITIONS, Q_STARTS, KV_STARTS, FIRST_PAGES, PAGES, WRITES, TILES, SEGMENTS = range(9)
X, Y, NORMED, QKV_OUT = range(9, 13)
HIDDEN, ATTENDED, INNER = 13, 17, 21  # of four entries each: numbers, scales, sums, wide
WIDE = 3  # the last of the four
# The model's:
LAYERS, LAST_NORM, EMBEDDING, COS, SIN, SETTINGS, EMBEDDING_SCALE, SCORE_SCALE, EPS = range(25, 34)
# The threads', each array's row being one thread's:
ATTENTION, GATES, COUNTERS, SCRATCH = range(34, 38)
ENTRIES = 38
# Columns of SETTINGS:
EMBEDDING_BITS, SHARED, GROUPS, SIZE, GATE, TILE_TOKENS, PAGE_SHIFT, CACHE, CACHE_STEP, NUM_TILES = range(10)
NUM_SETTINGS = 10


class State(NamedTuple):
    """What a step works on: T tokens, C channels, F of the MLP."""

    x: Any  # [T, C] float32
    y: Any  # [T, C]
    normed: Any  # [T, C], the result
    qkv: Any  # [T, (H + 2 G) D]
    hidden: Rounded  # [T, C]
    attended: Rounded  # [T, H D]
    inner: Rounded  # [T, F]


@numba.njit  # type: ignore[untyped-decorator]
def _team(me: int, threads: int, plan: Any, counters: int, scratch: int) -> Team:
    address = plan[scratch, 0]
    place: Any = np.int64(me)  # an unsigned index in a parallel loop: all that takes a Team would be compiled again
    return Team(place, threads, plan[counters, 0], address + place * plan[scratch, 2] if address else 0)


@numba.njit  # type: ignore[untyped-decorator]
def _rounded(plan: Any, entry: int) -> Any:
    return Rounded(bytes_(plan, entry), floats(plan, entry + 1), floats(plan, entry + 2), halves(plan, entry + WIDE))


@numba.njit  # type: ignore[untyped-decorator]
def _share_out(plan: Any) -> None:
    settings = table(plan, SETTINGS)[0]
    settings[NUM_TILES] = share_out(
        ints(plan, Q_STARTS),
        ints(plan, KV_STARTS),
        ints(plan, FIRST_PAGES),
        ints(plan, PAGES),
        settings[PAGE_SHIFT],
        settings[TILE_TOKENS],
        ints(plan, TILES),
        ints(plan, SEGMENTS),
    )


@numba.njit  # type: ignore[untyped-decorator]
def _work(team: Team, plan: Any) -> None:
    settings = table(plan, SETTINGS)[0]
    heads = Heads(settings[SHARED], settings[GROUPS], settings[SIZE], number(plan, SCORE_SCALE))
    state = State(
        floats(plan, X),
        floats(plan, Y),
        floats(plan, NORMED),
        floats(plan, QKV_OUT),
        _rounded(plan, HIDDEN),
        _rounded(plan, ATTENDED),
        _rounded(plan, INNER),
    )
    rows = Rows(
        ints(plan, POSITIONS),
        ints(plan, Q_STARTS),
        ints(plan, KV_STARTS),
        ints(plan, FIRST_PAGES),
        ints(plan, PAGES),
        ints(plan, WRITES),
        ints(plan, TILES),
        ints(plan, SEGMENTS),
        settings[NUM_TILES],
        settings[PAGE_SHIFT],
    )
    _embed(team, plan, settings[EMBEDDING_BITS], state)
    _layers(team, plan, settings, heads, state, rows)


@numba.njit  # type: ignore[untyped-decorator]
def _layers(team: Team, plan: Any, settings: Any, heads: Heads, state: State, rows: Rows) -> None:
    layers, cos_tables, sin_tables = table(plan, LAYERS), floats(plan, COS), floats(plan, SIN)
    eps, gate, lanes = number(plan, EPS), settings[GATE], settings[TILE_TOKENS] * heads.shared
    memory = plan[ATTENTION, 0] + team.me * plan[ATTENTION, 2]
    gates = floats(plan, GATES)[team.me].reshape((GATE_ROWS, 2 * WIDTH))
    post, phase = np.int64(0), 1
    for index in range(len(layers)):
        layer = layers[index]
        k_cache = settings[CACHE] + 2 * index * settings[CACHE_STEP]
        v_cache = k_cache + settings[CACHE_STEP]
        cos, sin = cos_tables[layer[ROTATION]], sin_tables[layer[ROTATION]]
        add_and_norm(team, phase, state.x, state.y, post, layer[NORM], eps, state.normed, state.hidden)
        product(team, phase + 1, layer[QKV], layer[QKV_BITS], state.hidden, state.qkv)
        turn_and_keep(
            team, phase + 2, state.qkv, layer[BIAS], layer[HEAD_NORMS], eps, cos, sin, heads, rows, k_cache, v_cache
        )
        attend(team, phase + 3, state.qkv, k_cache, v_cache, heads, layer[WINDOW], rows, memory, lanes, state.attended)
        product(team, phase + 4, layer[OUTPUT], layer[OUTPUT_BITS], state.attended, state.y)
        add_and_norm(
            team, phase + 5, state.x, state.y, layer[POST_NORM], layer[MLP_NORM], eps, state.normed, state.hidden
        )
        gated_product(team, phase + 6, layer[GATED], layer[GATED_BITS], gate, state.hidden, state.inner, gates)
        product(team, phase + 7, layer[DOWN], layer[DOWN_BITS], state.inner, state.y)
        post = layer[POST_MLP_NORM]
        phase += PHASES
    add_and_norm(team, phase, state.x, state.y, post, plan[LAST_NORM, 0], eps, state.normed, state.hidden)


@numba.njit  # type: ignore[untyped-decorator]
def _embed(team: Team, plan: Any, bits: int, state: State) -> None:
    items, channels = state.x.shape
    count = portion(items, team)
    tokens, factor = ints(plan, TOKENS), np.float32(number(plan, EMBEDDING_SCALE))
    packed = bytes_(plan, EMBEDDING).reshape(-1)
    while True:
        first = claim(team.counters, 0, count)
        if first >= items:
            break
        last = min(items, first + count)
        for token in range(first, last):
            read_row(packed, bits, tokens[token], state.x[token])
            for channel in range(channels):
                state.x[token, channel] *= factor
                state.y[token, channel] = np.float32(0.0)
        finish(team.counters, 0, last - first)
    wait(team.counters, 0, items)


@numba.njit  # type: ignore[untyped-decorator]
def read_row(packed: Any, bits: int, row: int, out: Any) -> None:
    """Row `row` of a packed weight, int8 bytes, as float32 to out [C]."""
    blocks, lane = len(out) // BLOCK, row % WIDTH
    size = block_bytes_of(bits)
    tile = (row // WIDTH) * blocks * size
    half, place = lane // HALF, lane % HALF
    numbers = size - 4 * WIDTH
    for block in range(blocks):
        here = tile + block * size
        at = here + numbers + 2 * lane
        scale = half_to_float(np.uint16(np.uint8(packed[at])) | np.uint16(np.uint8(packed[at + 1])) << np.uint16(8))
        at += 2 * WIDTH
        minimum = half_to_float(np.uint16(np.uint8(packed[at])) | np.uint16(np.uint8(packed[at + 1])) << np.uint16(8))
        here += half * (numbers // 2) + 4 * place
        for i in range(BLOCK):
            if bits == 8:
                value = np.uint8(packed[here + 64 * (i // 4) + i % 4])
            else:
                value = np.uint8(packed[here + 64 * (i // 8) + i % 4]) >> np.uint8(4 * (i // 4 % 2)) & np.uint8(15)
            out[block * BLOCK + i] = np.float32(value) * scale + minimum


@numba.njit  # type: ignore[untyped-decorator]
def block_bytes_of(bits: int) -> int:
    return BLOCK * WIDTH * bits // 8 + 4 * WIDTH


# Entries of the head's plan:
HEAD_IN, HEAD_OUT, HEAD_ROUNDED, HEAD_WEIGHT, HEAD_COUNTERS, HEAD_SCRATCH, HEAD_PEAKS = 0, 1, 2, 6, 7, 8, 9
HEAD_ENTRIES = 10


@numba.njit  # type: ignore[untyped-decorator]
def _project(team: Team, plan: Any, bits: int, outputs: int) -> None:
    hidden, rounded = floats(plan, HEAD_IN), _rounded(plan, HEAD_ROUNDED)
    items, channels = hidden.shape
    while True:
        row = claim(team.counters, 0, 1)
        if row >= items:
            break
        blocks = channels // 32
        round_blocks(address_of(hidden) + 4 * row * channels, rounded, row * blocks, blocks)
        finish(team.counters, 0, 1)
    wait(team.counters, 0, items)
    product(team, 1, plan[HEAD_WEIGHT, 0], bits, rounded, floats(plan, HEAD_OUT))
    _find_peaks(team, plan, outputs)


@numba.njit  # type: ignore[untyped-decorator]
def _find_peaks(team: Team, plan: Any, outputs: int) -> None:
    """Of as many rows as there is room for in HEAD_PEAKS: the largest of their logits, and its place."""
    logits, peaks = floats(plan, HEAD_OUT), doubles(plan, HEAD_PEAKS)
    items = len(peaks)
    while True:
        row = claim(team.counters, 2, 1)
        if row >= items:
            break
        highest, place = search(logits[row, :outputs])
        peaks[row, 0] = highest
        peaks[row, 1] = place
        finish(team.counters, 2, 1)
    wait(team.counters, 2, items)


def _kept(stamp: int) -> tuple[Any, Any]:
    """The two functions that are called from outside and kept on disk; see `cpu_cache`."""

    @kept(parallel=True)
    def forward(plan: Any, threads: int) -> None:
        """Runs the step that `plan` describes; hidden states come out in NORMED. The counters must be zero."""
        _ = stamp
        _share_out(plan)
        for me in numba.prange(threads):
            team = _team(me, threads, plan, COUNTERS, SCRATCH)
            if team.scratch:
                cpu_amx.begin(team.scratch)
            _work(team, plan)
            if team.scratch:
                cpu_amx.end()

    @kept(parallel=True)
    def project(plan: Any, bits: int, outputs: int, threads: int) -> None:
        """Float32 [n, C] times a packed weight, in the form that HEAD_ROUNDED has room for; and the peaks of its real
        outputs."""
        _ = stamp
        for me in numba.prange(threads):
            team = _team(me, threads, plan, HEAD_COUNTERS, HEAD_SCRATCH)
            if team.scratch:
                cpu_amx.begin(team.scratch)
            _project(team, plan, bits, outputs)
            if team.scratch:
                cpu_amx.end()

    return forward, project


forward, project = _kept(STAMP)
