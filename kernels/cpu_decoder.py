"""A whole decoder on a CPU with AVX2 or AVX-512 VNNI: packed weights, one call for a step.

Products of few tokens are those of 8-bit numbers, exact within a block; of many, where the CPU has AMX, those of
bfloat16. Everything is computed for each token by itself in a fixed order, so a token's bits depend on its sequence
and on which of the two its step took; with `wide_from` None or 1 there is one, and they depend on its sequence alone.

Knows: packed weights, the layout of a batch. Must not know: files, names of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt

from plait.kernels import cpu_amx, cpu_attend, cpu_blocks, cpu_features, cpu_passes, cpu_room, cpu_share
from plait.kernels import cpu_step as step
from plait.kernels.cpu_packed import Packed, columns
from plait.kernels.cpu_parts import LANES, Heads, Rounded
from plait.kernels.cpu_plan import Plan, aligned
from plait.kernels.cpu_team import STRIDE
from plait.kernels.cpu_tile import FORM, WIDTH
from plait.kernels.ragged import Ragged

NEEDED = ("avx2", "fma", "f16c")
WIDE_FROM = 12  # tokens of a step whose products are faster in bfloat16, AMX against AVX-512 VNNI
STRIP_ROWS = 64  # at least: each strip widens all weights by itself
EVERYTHING = 1 << 40  # a window that hides nothing
WIDE_ENTRIES = [entry + step.WIDE for entry in (step.HIDDEN, step.ATTENDED, step.INNER)]
KEPT_ROWS = 64  # rows of logits that are kept room for
NO_PEAKS = np.empty((0, 2))
Floats = npt.NDArray[np.float32]
Cache = npt.NDArray[np.uint16]  # [layers, keys and values, slots, G, D]: the bits of bfloat16


def missing_features() -> list[str]:
    """Instructions these kernels need and this CPU has not, or numba is told not to use."""
    return [name for name in NEEDED if not cpu_features.have(name)]


def instructions() -> str:
    """What multiplies where none is missing, in words."""
    return f"{INT8_ISA.name} and AMX" if cpu_amx.available() else FORM.name


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16, whatever numba is told: torch asks."""
    have = llvmlite.binding.get_host_cpu_features()
    return bool(have.get("avx512bf16") or have.get("amx-bf16"))


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms float32 [C]; head_norms [(H + G) * D]; bias [(H + 2 G) * D]; gated as `alternating` has it."""

    norm: Floats
    qkv: Packed
    bias: Floats | None
    head_norms: Floats | None
    output: Packed
    post_norm: Floats | None
    mlp_norm: Floats
    gated: Packed
    down: Packed
    post_mlp_norm: Floats | None
    window: int | None
    rotation: int


@dataclass(frozen=True)
class DecoderWeights:
    """A model. `rotations`: cos and sin [context, D / 2] float32 of each rotary table."""

    embedding: Packed
    embedding_scale: float
    layers: Sequence[LayerWeights]
    norm: Floats
    head: Packed
    rotations: Sequence[tuple[Floats, Floats]]
    heads: Heads
    eps: float
    gate: int


class CpuDecoder:
    """`forward` and `logits` as `runtime.models.decoder.Decoder` has them, in arrays. `threads`: at most.

    `wide_from`: from how many tokens on products are in bfloat16, if the CPU has AMX; None: never.
    """

    def __init__(self, weights: DecoderWeights, threads: int, wide_from: int | None = WIDE_FROM) -> None:
        self.weights = weights
        self._wide_from = wide_from if cpu_amx.available() else None
        self.threads = min(threads, numba.config.NUMBA_NUM_THREADS)
        self._tile_tokens = max(1, LANES // weights.heads.shared)
        self._head_plan = Plan(step.HEAD_ENTRIES)
        self._plan = self._fixed_plan()
        self._room_for = 0
        self._logits = aligned((0, 0), np.float32)
        self._kept_rounded: Rounded | None = None

    def forward(self, token_ids: npt.NDArray[np.int32], layout: Ragged, kv_cache: Cache) -> Floats:
        """Hidden states [T, C] float32 of token_ids [T], after the last norm; valid until the next call.

        Writes the keys and values of all tokens to the cache before it reads any.
        """
        count, plan = len(token_ids), self._plan
        if count > self._room_for:
            self._make_state(count)
        plan.numbers[self._state_entries, 1] = count
        if not self._is_wide(count):
            plan.numbers[WIDE_ENTRIES, 1] = 0
        self._settings[0, step.PAGE_SHIFT] = layout.page_size.bit_length() - 1
        self._settings[0, step.CACHE] = kv_cache.ctypes.data
        self._settings[0, step.CACHE_STEP] = kv_cache[0, 0].nbytes
        plan.put(step.TOKENS, token_ids)
        self._put_rows(layout)
        strips = self._strips(count)
        self._settings[0, step.STRIPS] = strips
        self._counters[:strips].fill(0)
        step.forward(plan.numbers, self.threads)
        hidden: Floats = self._state[step.NORMED][:count]
        return hidden

    def likeliest(self, hidden: Floats) -> npt.NDArray[np.float64]:
        """Of the logits of each row of hidden [n, C] the largest and the first place that has it, [n, 2].

        Not-a-number and any place where one is that.
        """
        peaks = np.empty((len(hidden), 2))
        self.logits(hidden, peaks=peaks)
        return peaks

    def logits(
        self,
        hidden: Floats,
        ids: npt.NDArray[np.int64] | None = None,
        peaks: npt.NDArray[np.float64] = NO_PEAKS,
    ) -> Floats:
        """[n, V] float32 for hidden [n, C]; with `ids` [k] only those tokens' logits, [n, k], of the same bits.

        All logits are valid until the next call, and may be changed. `peaks`: see `likeliest`.
        """
        head = self.weights.head if ids is None else columns(self.weights.head, ids)
        count, channels = hidden.shape
        out = self._room_for_logits(count, len(head.data) * WIDTH)
        plan = self._head_plan
        plan.put(step.HEAD_IN, np.ascontiguousarray(hidden))
        plan.put(step.HEAD_OUT, out)
        for i, array in enumerate(self._room_for_rounded(count, channels)):
            plan.put(step.HEAD_ROUNDED + i, array, count)
        if not self._is_wide(count):
            plan.numbers[step.HEAD_ROUNDED + step.WIDE, 1] = 0
        plan.put(step.HEAD_WEIGHT, head.data)
        plan.put(step.HEAD_COUNTERS, self._counters)
        plan.put(step.HEAD_PEAKS, peaks)
        self._counters[0, : step.HEAD_PHASES].fill(0)  # the others' lines lie in other cores' caches
        step.project(plan.numbers, head.bits, head.outputs, self.threads)
        found: Floats = out[:, : head.outputs]
        return found

    def _room_for_logits(self, count: int, width: int) -> Floats:
        """The same memory again and again for as many rows as decode at once: fresh pages cost more than the search.

        Products in bfloat16 write as many rows as fill matrix registers.
        """
        if count > KEPT_ROWS:
            return aligned((_filled(count), width), np.float32)[:count]
        if width != self._logits.shape[1] or count > len(self._logits):
            self._logits = aligned((_filled(count), width), np.float32)
        return self._logits[:count]

    def _room_for_rounded(self, count: int, channels: int) -> Rounded:
        """The same memory for what becomes of hidden states, too."""
        if count > KEPT_ROWS:
            return _rounded(count, channels)
        if self._kept_rounded is None or count > len(self._kept_rounded.wide):
            self._kept_rounded = _rounded(count, channels)
        return self._kept_rounded

    def _is_wide(self, count: int) -> bool:
        return self._wide_from is not None and count >= self._wide_from

    def _strips(self, count: int) -> int:
        """Parts of a step's rows that threads take through a layer by themselves."""
        return max(1, min(self.threads, count // STRIP_ROWS)) if self._is_wide(count) else 1

    def _put_rows(self, layout: Ragged) -> None:
        plan, q_starts = self._plan, layout.q_starts
        plan.put(step.POSITIONS, layout.positions)
        plan.put(step.Q_STARTS, q_starts)
        plan.put(step.KV_STARTS, layout.kv_starts)
        plan.put(step.FIRST_PAGES, layout.first_pages)
        plan.put(step.PAGES, layout.kv_pages)
        plan.put(step.WRITES, layout.write_pages)
        most = int(q_starts[-1]) + len(q_starts)  # segments, and tiles
        plan.put(step.TILES, np.empty(most, np.int32))
        plan.put(step.SEGMENTS, np.empty(cpu_share.SEGMENT * most, np.int32))
        plan.put(step.PIECES, np.empty(most, np.int32))
        plan.put(step.DONE, np.empty((most, self.weights.heads.groups), np.int64))

    def _fixed_plan(self) -> Plan:
        """What stays the same from step to step."""
        weights, plan = self.weights, Plan(step.ENTRIES)
        heads = weights.heads
        capacity = cpu_room.capacity(self._tile_tokens * heads.shared, heads.groups)
        phases = step.phases.py_func(len(weights.layers))
        self._counters = np.zeros((self.threads, phases, 2 * STRIDE), np.int64)
        self._settings = np.zeros((1, step.NUM_SETTINGS), np.int64)
        self._settings[0, : step.PAGE_SHIFT] = (
            weights.embedding.bits,
            heads.shared,
            heads.groups,
            heads.head_dim,
            weights.gate,
            self._tile_tokens,
            capacity,
            cpu_blocks.MATRICES if cpu_amx.available() else cpu_blocks.WITHOUT_AMX,
        )
        plan.put(step.LAYERS, np.array([_columns(layer) for layer in weights.layers], dtype=np.int64))
        plan.put(step.LAST_NORM, weights.norm)
        plan.put(step.EMBEDDING, weights.embedding.data)
        for entry, i in ((step.COS, 0), (step.SIN, 1)):
            plan.put(entry, np.stack([pair[i] for pair in weights.rotations]))
        plan.put(step.SETTINGS, self._settings)
        for entry, value in (
            (step.EMBEDDING_SCALE, weights.embedding_scale),
            (step.SCORE_SCALE, heads.scale),
            (step.EPS, weights.eps),
        ):
            plan.put(entry, np.array([value], np.float64))
        plan.put(step.COUNTERS, self._counters)
        if cpu_amx.available():
            scratch = cpu_amx.allocate_scratch(self.threads, cpu_passes.SCRATCH_BYTES)
            plan.put(step.SCRATCH, scratch)
            self._head_plan.put(step.HEAD_SCRATCH, scratch)
        plan.put(step.ATTENTION, cpu_room.allocate(self.threads, capacity, heads.head_dim))
        plan.put(step.STORE, aligned((1, cpu_attend.STORE_BYTES), np.uint8))
        plan.put(step.GATES, _zeros((self.threads, step.GATE_ROWS * 2 * WIDTH), np.float32))
        return plan

    def _make_state(self, count: int) -> None:
        first, heads = self.weights.layers[0], self.weights.heads
        channels, wide = first.qkv.inputs, first.down.inputs
        self._state = {
            entry: _zeros((_filled(count), width), np.float32)
            for entry, width in (
                (step.X, channels),
                (step.Y, channels),
                (step.NORMED, channels),
                (step.QKV_OUT, first.qkv.outputs),
            )
        }
        attended = heads.shared * heads.groups * heads.head_dim
        for entry, width in ((step.HIDDEN, channels), (step.ATTENDED, attended), (step.INNER, wide)):
            self._state |= {entry + i: array for i, array in enumerate(_rounded(count, width))}
        for entry, array in self._state.items():
            self._plan.put(entry, array)
        self._state_entries = list(self._state)
        self._room_for = count


def _filled(rows: int) -> int:
    """So many rows as fill matrix registers."""
    return rows + -rows % cpu_amx.ROWS


def _rounded(rows: int, channels: int) -> Rounded:
    """Room for one of the two forms; numbers lie where the wide ones do."""
    rows = _filled(rows)
    wide = _zeros((rows, channels), np.uint16)
    numbers = wide.reshape(-1)[: wide.size // 2].view(np.int8).reshape(rows, channels)
    scales, sums = (_zeros((rows, channels // 32), np.float32) for _ in range(2))
    return Rounded(numbers, scales, sums, wide)


def _zeros(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    array = aligned(shape, dtype)
    array.fill(0)
    return array


def _address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def _columns(layer: LayerWeights) -> list[int]:
    weights = [(each.address, each.bits) for each in (layer.qkv, layer.output, layer.gated, layer.down)]
    norms = (layer.norm, layer.post_norm, layer.mlp_norm, layer.post_mlp_norm, layer.head_norms, layer.bias)
    return [
        *(number for pair in weights for number in pair),
        *(_address(each) for each in norms),
        layer.window or EVERYTHING,
        layer.rotation,
    ]
