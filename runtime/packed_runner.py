"""Owns a model whose weights are packed for a CPU and its KV cache, and turns a batch into one ragged forward.

Knows: arrays, memory. Must not know: torch, which it does without; sessions, sampling, the wire.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from plait.kernels.cpu_kept import compile_missing
from plait.kernels.cpu_plan import aligned
from plait.kernels.ragged import Ragged
from plait.runtime.batch_arrays import batch_arrays
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.machine import num_threads, spare_memory
from plait.runtime.models.packed import packed_decoder
from plait.runtime.models.source import Checkpoint
from plait.runtime.running import (
    CPU_BATCH_TOKENS,
    QUANTUM,
    Floats,
    Narrow,
    Progress,
    Sums,
    choose_num_pages,
    warm_up,
)
from plait.runtime.scheduler.rows import Batch

BFLOAT16_BYTES = 2


class PackedRunner:
    """A `running.Runner`. With `deterministic` a row's bits depend on its own tokens alone; see `CpuDecoder`.

    Raises `models.packed.NotStored` where "as-stored" cannot be had, which its header does not always tell.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress = lambda share, doing: None
    ) -> None:
        if config.kv_dtype != "auto":
            raise InputError(
                f"kv_dtype {config.kv_dtype!r} needs Triton's attention on a GPU; here attention is: numba"
            )
        longest = checkpoint.config.context_length
        self.context_length = min(config.context_length or longest, longest)
        # LongRoPE has one set of frequencies for short contexts and one for long ones.
        self.config = model = replace(checkpoint.config, context_length=self.context_length)
        self.model = packed_decoder(
            model,
            checkpoint,
            "as-stored" if config.weights == "auto" else config.weights,
            num_threads(),
            config.deterministic,
            lambda share: progress(0.9 * share, "loading the model"),
        )
        self.max_batch_tokens = config.max_batch_tokens or CPU_BATCH_TOKENS
        budget = config.kv_memory_bytes or spare_memory()
        self.num_pages = choose_num_pages(budget, self.page_bytes, config.max_pages)
        self.max_session_tokens = min(self.context_length, self.num_pages)
        shape = (model.num_layers, 2, self.num_pages, model.num_kv_heads, model.head_dim)
        self.kv_cache = aligned(shape, np.uint16)
        progress(0.9, "loading kernels")
        compile_missing(lambda doing: progress(0.9, doing))
        warm_up(self)

    num_spared_tokens = 0  # each row reads its own pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return self.config.num_layers * 2 * self.config.num_kv_heads * self.config.head_dim * BFLOAT16_BYTES

    def forward(self, batch: Batch) -> Floats:
        """As `Runner` has it; valid until the next call."""
        arrays = batch_arrays(batch)
        layout = Ragged(arrays.q_starts, arrays.kv_starts, arrays.kv_pages, arrays.positions, arrays.writes)
        hidden = self.model.forward(arrays.token_ids, layout, self.kv_cache)
        return hidden if len(arrays.wanted) == len(hidden) else hidden[arrays.wanted]

    def states(self, hidden: Floats, places: list[int]) -> Floats:
        """As `Runner` has it."""
        return hidden[places]

    def total(self, hidden: Floats) -> Sums:
        """As `Runner` has it."""
        found: Sums = np.rint(hidden * np.float32(1 / QUANTUM)).sum(axis=0, dtype=np.float64) * QUANTUM
        return found

    def likeliest(self, hidden: Floats) -> tuple[list[float], list[int]]:
        """As `Runner` has it."""
        if not len(hidden):
            return [], []
        found = self.model.likeliest(hidden)
        return found[:, 0].tolist(), found[:, 1].astype(np.int64).tolist()

    def logits(self, hidden: Floats, narrow: Narrow) -> Floats:
        """As `Runner` has it; valid until the next call, and may be changed."""
        if not len(hidden):
            return np.empty((0, self.config.vocab_size), np.float32)
        if not narrow:
            return self.model.logits(hidden)
        out = np.full((len(hidden), self.config.vocab_size), -np.inf, np.float32)
        wide = [i for i in range(len(hidden)) if i not in narrow]
        if wide:
            out[wide] = self.model.logits(hidden[wide])
        for i, ids in narrow.items():
            out[i, ids] = self.model.logits(hidden[i : i + 1], ids)[0]
        return out
