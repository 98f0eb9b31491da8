"""Owns a model whose weights are packed for a CPU and its KV cache, and turns a batch into one ragged forward.

Knows: arrays, memory. Must not know: torch, which it does without; sessions, sampling, the wire.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from plait.kernels.cpu.kernel_args import aligned_empty
from plait.kernels.cpu.precompile import compile_missing
from plait.kernels.numpy_layout import NumpyAttentionLayout
from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.executor.batch_arrays import batch_arrays
from plait.runtime.executor.host_machine import host_kv_cache_budget, num_threads
from plait.runtime.executor.runner import (
    DEFAULT_CPU_BATCH_TOKENS,
    SUM_QUANTUM,
    AllowedIds,
    StartupProgress,
    choose_num_pages,
    warm_up,
)
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.loading.cpu_weights import load_packed_decoder

BFLOAT16_BYTES = 2


class PackedCpuRunner:
    """A `running.Runner`. With `deterministic` a row's bits depend on its own tokens alone; see `CpuDecoder`.

    Raises `models.packed.NotPackable` where "as-stored" cannot be had, which its header does not always tell.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: StartupProgress = lambda fraction, doing: None
    ) -> None:
        if config.kv_dtype != "auto":
            raise InputError(
                f"kv_dtype {config.kv_dtype!r} needs Triton's attention on a GPU; here attention is: numba"
            )
        model_context_length = checkpoint.config.context_length
        self.context_length = min(config.context_length or model_context_length, model_context_length)
        # LongRoPE has one set of frequencies for short contexts and one for long ones.
        self.config = model = replace(checkpoint.config, context_length=self.context_length)
        self.model = load_packed_decoder(
            model,
            checkpoint,
            "as-stored" if config.weights == "auto" else config.weights,
            num_threads(),
            config.deterministic,
            lambda fraction: progress(0.9 * fraction, "loading the model"),
        )
        self.max_batch_tokens = config.max_batch_tokens or DEFAULT_CPU_BATCH_TOKENS
        budget = config.kv_memory_bytes or host_kv_cache_budget()
        self.num_pages = choose_num_pages(budget, self.page_bytes, config.max_pages)
        self.max_session_tokens = min(self.context_length, self.num_pages)
        shape = (model.num_layers, 2, self.num_pages, model.num_kv_heads, model.head_dim)
        self.kv_cache = aligned_empty(shape, np.uint16)
        progress(0.9, "loading kernels")
        compile_missing(lambda doing: progress(0.9, doing))
        warm_up(self)

    num_spared_tokens = 0  # each row reads its own pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return self.config.num_layers * 2 * self.config.num_kv_heads * self.config.head_dim * BFLOAT16_BYTES

    def forward(self, batch: Batch) -> Float32Array:
        """As `Runner` has it; valid until the next call."""
        arrays = batch_arrays(batch)
        layout = NumpyAttentionLayout(
            arrays.q_starts, arrays.kv_starts, arrays.kv_pages, arrays.positions, arrays.write_slots
        )
        hidden = self.model.forward(arrays.token_ids, layout, self.kv_cache)
        return hidden if len(arrays.output_indices) == len(hidden) else hidden[arrays.output_indices]

    def hidden_states_at(self, hidden: Float32Array, places: list[int]) -> Float32Array:
        """As `Runner` has it."""
        return hidden[places]

    def sum_hidden_states(self, hidden: Float32Array) -> Float64Array:
        """As `Runner` has it."""
        found: Float64Array = np.rint(hidden * np.float32(1 / SUM_QUANTUM)).sum(axis=0, dtype=np.float64) * SUM_QUANTUM
        return found

    def argmax_tokens(self, hidden: Float32Array) -> tuple[list[float], list[int]]:
        """As `Runner` has it."""
        if not len(hidden):
            return [], []
        found = self.model.argmax_tokens(hidden)
        return found[:, 0].tolist(), found[:, 1].astype(np.int64).tolist()

    def logits(self, hidden: Float32Array, allowed_ids: AllowedIds) -> Float32Array:
        """As `Runner` has it; valid until the next call, and may be changed."""
        if not len(hidden):
            return np.empty((0, self.config.vocab_size), np.float32)
        if not allowed_ids:
            return self.model.logits(hidden)
        out = np.full((len(hidden), self.config.vocab_size), -np.inf, np.float32)
        wide = [i for i in range(len(hidden)) if i not in allowed_ids]
        if wide:
            out[wide] = self.model.logits(hidden[wide])
        for i, ids in allowed_ids.items():
            out[i, ids] = self.model.logits(hidden[i : i + 1], ids)[0]
        return out
