"""A decoder's whole step in one parallel region: the order of its phases, and the output head's.

Knows: the phases, and where a model's weights lie. Must not know: files, torch, sessions.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels import cpu_amx
from plait.kernels.cpu_attend import Parts, attend, divide
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
from plait.kernels.cpu_share import count_pieces, share_out
from plait.kernels.cpu_strips import PAIR, State, strip_places, strip_rows, strip_state, strip_team
from plait.kernels.cpu_team import claim, finish, wait
from plait.kernels.cpu_tile import BLOCK, HALF, WIDTH
from plait.kernels.cpu_walk import Caches

GATE_ROWS = PAIR  # rows of gate and up that are held before they are multiplied

# Columns of `Model.layers`: addresses (0: there is none), bits, and numbers of one layer.
QKV, QKV_BITS, OUTPUT, OUTPUT_BITS, GATED, GATED_BITS, DOWN, DOWN_BITS = range(8)
NORM, POST_NORM, MLP_NORM, POST_MLP_NORM, HEAD_NORMS, BIAS, WINDOW, ROTATION = range(8, 16)
COLUMNS = 16
PHASES = 8  # of one layer, the fourth being attention, which the first strip counts for all


# Entries of the plan. A step's own:
TOKENS, POSITIONS, Q_STARTS, KV_STARTS, FIRST_PAGES, PAGES, WRITES, TILES, SEGMENTS = range(9)
X, Y, NORMED, QKV_OUT = range(9, 13)
HIDDEN, ATTENDED, INNER = 13, 17, 21  # of four entries each: numbers, scales, sums, wide
WIDE = 3  # the last of the four
# The model's:
LAYERS, LAST_NORM, EMBEDDING, COS, SIN, SETTINGS, EMBEDDING_SCALE, SCORE_SCALE, EPS = range(25, 34)
# The threads', each array's row being one thread's:
ATTENTION, GATES, COUNTERS, SCRATCH = range(34, 38)
# Attention's parts of a step:
PIECES, STORE, DONE = range(38, 41)
ENTRIES = 41
# Columns of SETTINGS:
EMBEDDING_BITS, SHARED, GROUPS, SIZE, GATE, TILE_TOKENS, CAPACITY, FORM, PAGE_SHIFT, CACHE, CACHE_STEP = range(11)
NUM_TILES, STRIPS, APART, BUNDLE, TILE_LANES = range(11, 16)
NUM_SETTINGS = 16


@numba.njit  # type: ignore[untyped-decorator]
def phases(layers: int) -> int:
    """Of one strip: the embedding, each layer's, the last norm."""
    return 2 + PHASES * layers


@numba.njit  # type: ignore[untyped-decorator]
def _team(me: int, threads: int, plan: Any, counters: int, scratch: int) -> Team:
    address = plan[scratch, 0]
    place: Any = np.int64(me)  # an unsigned index in a parallel loop: all that takes a Team would be compiled again
    return Team(place, threads, plan[counters, 0], address + place * plan[scratch, 2] if address else 0)


@numba.njit  # type: ignore[untyped-decorator]
def _rounded(plan: Any, entry: int) -> Any:
    return Rounded(bytes_(plan, entry), floats(plan, entry + 1), floats(plan, entry + 2), halves(plan, entry + WIDE))


@numba.njit  # type: ignore[untyped-decorator]
def _heads(plan: Any, settings: Any) -> Heads:
    return Heads(settings[SHARED], settings[GROUPS], settings[SIZE], number(plan, SCORE_SCALE))


@numba.njit  # type: ignore[untyped-decorator]
def _share_out(plan: Any, threads: int) -> None:
    """What attention's items are in this step, in each of its layers."""
    settings, pieces = table(plan, SETTINGS)[0], ints(plan, PIECES)
    q_starts, kv_starts, tiles, segments = (
        ints(plan, Q_STARTS), ints(plan, KV_STARTS), ints(plan, TILES), ints(plan, SEGMENTS),
    )  # fmt: skip
    tiles_of = ints(plan, FIRST_PAGES), ints(plan, PAGES), settings[PAGE_SHIFT], settings[TILE_TOKENS]
    num_tiles = share_out(q_starts, kv_starts, *tiles_of, tiles, segments)
    tokens, longest = count_pieces(q_starts, kv_starts, num_tiles, tiles, segments, pieces)
    settings[NUM_TILES], settings[TILE_LANES] = num_tiles, tokens * settings[SHARED]
    heads = _heads(plan, settings)
    apart, bundle = divide(num_tiles, np.int64(pieces[num_tiles]), longest, tokens * heads.shared, heads, threads)
    settings[APART], settings[BUNDLE] = apart, bundle
    table(plan, DONE)[:] = 0


@numba.njit  # type: ignore[untyped-decorator]
def _work(team: Team, plan: Any) -> None:
    settings = table(plan, SETTINGS)[0]
    heads = _heads(plan, settings)
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
        ints(plan, PIECES),
        settings[NUM_TILES],
        settings[PAGE_SHIFT],
    )
    _layers(team, plan, settings, heads, state, rows)


@numba.njit  # type: ignore[untyped-decorator]
def _layers(team: Team, plan: Any, settings: Any, heads: Heads, state: State, rows: Rows) -> None:
    """Each thread begins with its own strips and then helps with the others', so when it is through all are done."""
    layers, memory = table(plan, LAYERS), plan[ATTENTION, 0] + team.me * plan[ATTENTION, 2]
    parts = Parts(
        settings[FORM], settings[APART], settings[BUNDLE], settings[TILE_LANES], plan[STORE, 0], plan[DONE, 0]
    )
    strips, tokens = settings[STRIPS], ints(plan, TOKENS)
    for index in range(len(layers) + 1):
        for i in range(strips):
            strip = (team.me * strips // team.num_threads + i) % strips
            begin, end = strip_rows(strip, strips, len(state.residual))
            own, part = strip_team(team, strip, phases(len(layers))), strip_state(state, begin, end)
            if index:
                _after_attention(own, plan, settings[GATE], index - 1, part)
            else:
                _embed(own, plan, settings[EMBEDDING_BITS], tokens[begin:end], part)
            _before_attention(own, plan, settings, heads, index, part, strip_places(rows, begin, end))
        if index < len(layers):
            keys = settings[CACHE] + 2 * index * settings[CACHE_STEP]
            caches, phase = Caches(keys, keys + settings[CACHE_STEP], layers[index, WINDOW]), PHASES * index + 4
            attend(team, phase, state.qkv, caches, heads, rows, parts, memory, settings[CAPACITY], state.attended)


@numba.njit  # type: ignore[untyped-decorator]
def _before_attention(team: Team, plan: Any, settings: Any, heads: Heads, index: int, state: State, rows: Rows) -> None:
    """Of layer `index`; behind the last one, the model's last norm."""
    layers, eps, phase = table(plan, LAYERS), number(plan, EPS), PHASES * index + 1
    post = layers[index - 1, POST_MLP_NORM] if index else np.int64(0)
    norm = layers[index, NORM] if index < len(layers) else plan[LAST_NORM, 0]
    add_and_norm(team, phase, state.residual, state.block_out, post, norm, eps, state.normed, state.hidden)
    if index == len(layers):
        return
    layer = layers[index]
    keys = settings[CACHE] + 2 * index * settings[CACHE_STEP]
    cos, sin = floats(plan, COS)[layer[ROTATION]], floats(plan, SIN)[layer[ROTATION]]
    product(team, phase + 1, layer[QKV], layer[QKV_BITS], state.hidden, state.qkv)
    turn_and_keep(
        team, phase + 2, state.qkv, layer[BIAS], layer[HEAD_NORMS], eps, cos, sin, heads, rows, keys,
        keys + settings[CACHE_STEP],
    )  # fmt: skip


@numba.njit  # type: ignore[untyped-decorator]
def _after_attention(team: Team, plan: Any, gate: int, index: int, state: State) -> None:
    """Of layer `index`, but for adding its last product."""
    layer, phase = table(plan, LAYERS)[index], PHASES * index + 5
    eps, gates = number(plan, EPS), floats(plan, GATES)[team.me].reshape((GATE_ROWS, 2 * WIDTH))
    product(team, phase, layer[OUTPUT], layer[OUTPUT_BITS], state.attended, state.block_out)
    add_and_norm(team, phase + 1, state.residual, state.block_out, layer[POST_NORM], layer[MLP_NORM], eps, state.normed, state.hidden)
    gated_product(team, phase + 2, layer[GATED], layer[GATED_BITS], gate, state.hidden, state.inner, gates)
    product(team, phase + 3, layer[DOWN], layer[DOWN_BITS], state.inner, state.block_out)


@numba.njit  # type: ignore[untyped-decorator]
def _embed(team: Team, plan: Any, bits: int, tokens: Any, state: State) -> None:
    items, channels = state.residual.shape
    count = portion(items, team)
    factor, packed = np.float32(number(plan, EMBEDDING_SCALE)), bytes_(plan, EMBEDDING).reshape(-1)
    while True:
        first = claim(team.counters, 0, count)
        if first >= items:
            break
        last = min(items, first + count)
        for token in range(first, last):
            read_row(packed, bits, tokens[token], state.residual[token])
            for channel in range(channels):
                state.residual[token, channel] *= factor
                state.block_out[token, channel] = np.float32(0.0)
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
HEAD_ENTRIES, HEAD_PHASES = 10, 3


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
        _share_out(plan, threads)
        for me in numba.prange(threads):
            team = _team(me, threads, plan, COUNTERS, SCRATCH)
            if team.scratch:
                cpu_amx.load_tile_config(team.scratch)
            _work(team, plan)
            if team.scratch:
                cpu_amx.release_tiles()

    @kept(parallel=True)
    def project(plan: Any, bits: int, outputs: int, threads: int) -> None:
        """Float32 [n, C] times a packed weight, in the form that HEAD_ROUNDED has room for; and the peaks of its real
        outputs."""
        _ = stamp
        for me in numba.prange(threads):
            team = _team(me, threads, plan, HEAD_COUNTERS, HEAD_SCRATCH)
            if team.scratch:
                cpu_amx.load_tile_config(team.scratch)
            _project(team, plan, bits, outputs)
            if team.scratch:
                cpu_amx.release_tiles()

    return forward, project


forward, project = _kept(STAMP)
