"""The packed CPU model runner: owns a packed model and its KV cache, and runs it without torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu import amx
from plait.kernels.cpu.decoder import int8_slot_bytes
from plait.kernels.cpu.gemm import packed_weights
from plait.kernels.cpu.gemm.layout_kernels import layout_kernel
from plait.kernels.cpu.gemm.layouts import LAYOUTS
from plait.kernels.cpu.kernel_args import aligned_empty
from plait.kernels.cpu.precompile import load_kernels
from plait.kernels.numpy_layout import NumpyAttentionLayout
from plait.runtime.adapters.adapter_pool import AdapterPool
from plait.runtime.adapters.packed_updates import PackedAdapters
from plait.runtime.arrays import Float32Array, Float64Array, IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig, WeightFormat
from plait.runtime.errors import InputError
from plait.runtime.executor.backend_selection import resolve_weight_format
from plait.runtime.executor.batch_arrays import AdapterRows, adapter_rows, batch_arrays
from plait.runtime.executor.host_machine import host_adapter_budget, host_kv_cache_budget, num_threads
from plait.runtime.executor.kernel_cache import COMPILING_EVERY_TIME, can_keep_kernels
from plait.runtime.executor.runner import (
    DEFAULT_CPU_BATCH_TOKENS,
    SUM_QUANTUM,
    AllowedIds,
    StartupProgress,
    choose_num_pages,
    fill_logits,
    warm_up,
)
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.loading.cpu_weights import load_packed_decoder
from plait.runtime.models.quantization import WEIGHT_BITS

BFLOAT16_BYTES = 2


class _KernelLoading:
    """Loads the kernels in a thread, and compiles those that are not cached; the end of the block waits for it.

    Reading a model's weights mostly runs without the interpreter lock, so both take place at once. `show` reports what
    the block does; while kernels are compiled, which takes longer, that is reported instead. The end waits until
    kernels can be called; with `deterministic` until they are optimized.
    """

    def __init__(self, progress: StartupProgress, layouts: Iterable[str] = (), deterministic: bool = False) -> None:
        self._progress, self._layouts, self._deterministic = progress, layouts, deterministic
        self._lock = threading.Lock()  # one report at a time
        self._is_compiling = False
        self._executor = ThreadPoolExecutor(2)

    def __enter__(self) -> _KernelLoading:
        self._futures = [self._executor.submit(self._load), self._executor.submit(self._load_layouts)]
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        self._executor.shutdown()
        if error_type is None:
            for future in self._futures:
                future.result()

    def show(self, fraction: float, doing: str) -> None:
        with self._lock:
            if not self._is_compiling:
                self._progress(fraction, doing)

    def _show_compiling(self, fraction: float, doing: str) -> None:
        with self._lock:
            self._is_compiling = True
            self._progress(fraction, doing if can_keep_kernels() else COMPILING_EVERY_TIME)

    def _load(self) -> None:
        load_kernels(self._show_compiling, self._deterministic)

    def _load_layouts(self) -> None:
        for layout in self._layouts:
            layout_kernel(layout)


def _expected_layouts(checkpoint: Checkpoint, weight_format: WeightFormat) -> list[str]:
    """Returns the layouts that most of a model's packed weights will have, as far as its files' headers tell."""
    stored = {checkpoint.stored_type(name) for name in checkpoint.names() if name.endswith("_proj.weight")}
    if weight_format == "as-stored":
        return sorted(stored & LAYOUTS.keys())
    bits = WEIGHT_BITS[weight_format]
    is_exact = {name: name in LAYOUTS and LAYOUTS[name].bits <= bits for name in stored}
    return sorted({name if exact else packed_weights.ROUNDED_LAYOUTS[bits] for name, exact in is_exact.items()})


class PackedCpuRunner:
    """Implements `Runner` with the packed CPU kernels.

    With `deterministic`, a row's bits depend on its own tokens alone; see `CpuDecoder`. Raises InputError for a
    `kv_dtype` or a KV budget that cannot be served, and `cpu_weights.NotPackable` for weights that cannot be packed
    "as-stored", which their headers do not always show.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: StartupProgress = lambda fraction, doing: None
    ) -> None:
        if config.kv_dtype not in ("auto", "int8"):
            raise InputError(f"kv_dtype {config.kv_dtype!r} needs Triton's attention on a GPU; a CPU has 'int8'")
        self._has_int8_cache = config.kv_dtype == "int8"
        model_context_length = checkpoint.config.context_length
        self.context_length = min(config.context_length or model_context_length, model_context_length)
        # LongRoPE chooses its frequencies by the context length.
        self.config = model = replace(checkpoint.config, context_length=self.context_length)
        weight_format = resolve_weight_format(config, checkpoint).weight_format
        with _KernelLoading(progress, _expected_layouts(checkpoint, weight_format), config.deterministic) as kernels:
            self.model = load_packed_decoder(
                model,
                checkpoint,
                weight_format,
                num_threads(),
                config.deterministic,
                lambda fraction: kernels.show(0.9 * fraction, "loading the model"),
            )
            kernels.show(0.9, "loading kernels")
        self.adapter_pool: AdapterPool | None = None
        self._adapter_rows: AdapterRows | None = None  # of the latest batch
        if config.has_adapters:
            if config.deterministic and amx.available():
                raise InputError("adapters with deterministic=True need a CPU without AMX")
            self.adapter_pool = AdapterPool(model, config.adapters, config.max_adapters, self._make_adapter_slots)
        self.max_batch_tokens = config.max_batch_tokens or DEFAULT_CPU_BATCH_TOKENS
        budget = config.kv_memory_bytes or host_kv_cache_budget()
        self.num_pages = choose_num_pages(budget, self.page_bytes, config.max_pages)
        self.max_session_tokens = min(self.context_length, self.num_pages)
        shape = (model.num_layers, 2, self.num_pages)
        self.kv_cache = (
            aligned_empty((*shape, int8_slot_bytes(model.num_kv_heads, model.head_dim)), np.uint8)
            if self._has_int8_cache
            else aligned_empty((*shape, model.num_kv_heads, model.head_dim), np.uint16)
        )
        warm_up(self)

    def _make_adapter_slots(self, num_slots: int) -> PackedAdapters:
        slots = PackedAdapters(self.config, self.model.num_outputs(), num_slots, host_adapter_budget())
        self.model.set_adapters(slots)
        return slots

    num_saved_reads = 0  # the CPU kernels do not count the reads that rows share

    @property
    def page_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        slot_bytes = int8_slot_bytes(heads, head_dim) if self._has_int8_cache else heads * head_dim * BFLOAT16_BYTES
        return self.config.num_layers * 2 * slot_bytes

    def forward(self, batch: Batch) -> Float32Array:
        """As in `Runner`; valid until the next call."""
        arrays = batch_arrays(batch)
        layout = NumpyAttentionLayout(
            arrays.q_starts, arrays.kv_starts, arrays.kv_pages, arrays.positions, arrays.write_slots
        )
        if self.adapter_pool is not None:
            self._adapter_rows = adapter_rows(batch, self.adapter_pool.slots)
        slots = None if self._adapter_rows is None else self._adapter_rows.of_tokens
        hidden = self.model.forward(arrays.token_ids, layout, self.kv_cache, slots)
        return hidden if len(arrays.output_indices) == len(hidden) else hidden[arrays.output_indices]

    def capture(self, layers: Sequence[int]) -> None:
        """Keeps the residual stream before these layers, in ascending order, in further steps; see `captured`.

        The number of layers stands for the stream behind the last one, before the final norm.
        """
        self.model.capture(layers)

    @property
    def captured(self) -> Float32Array:
        """What `capture` asks for, [T, layers * C] of the latest batch's tokens; valid until the next `forward`."""
        return self.model.captured

    def hidden_states_at(self, hidden: Float32Array, indices: list[int]) -> Float32Array:
        """As in `Runner`."""
        return hidden[indices]

    def use_device(self) -> None:
        """As in `Runner`: a thread of a CPU needs nothing."""

    def sum_hidden_states(self, hidden: Float32Array) -> Float64Array:
        """As in `Runner`."""
        quanta: Float64Array = np.rint(hidden * np.float32(1 / SUM_QUANTUM)).sum(axis=0, dtype=np.float64)
        return quanta * SUM_QUANTUM

    def argmax_tokens(self, hidden: Float32Array) -> tuple[list[float], list[int]]:
        """As in `Runner`."""
        if not len(hidden):
            return [], []
        max_and_token = self.model.argmax_tokens(hidden, self._logit_slots(hidden))
        return max_and_token[:, 0].tolist(), max_and_token[:, 1].astype(np.int64).tolist()

    def logits(self, hidden: Float32Array, allowed_ids: AllowedIds) -> Float32Array:
        """As in `Runner`; valid until the next call, and the caller may change it."""
        if not len(hidden):
            return np.empty((0, self.config.vocab_size), np.float32)
        slots = self._logit_slots(hidden)
        if not allowed_ids:
            return self.model.logits(hidden, adapter_slots=slots)

        def compute(rows: list[int], ids: npt.NDArray[np.int64] | None = None) -> Float32Array:
            return self.model.logits(hidden[rows], ids, adapter_slots=None if slots is None else slots[rows])

        out = np.full((len(hidden), self.config.vocab_size), -np.inf, np.float32)
        fill_logits(out, allowed_ids, compute)
        return out

    def _logit_slots(self, hidden: Float32Array) -> IntArray | None:
        """[n] int32: the slots of the adapters of the latest batch's logits; None if it has no adapters."""
        if self._adapter_rows is None:
            return None
        assert len(self._adapter_rows.of_logits) == len(hidden)
        return self._adapter_rows.of_logits
