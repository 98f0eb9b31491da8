"""The torch model runner: owns the model and its KV cache, and runs one ragged forward pass per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.kv_cache import LayerCache, allocate_caches, cache_dtype, kv_slot_bytes
from plait.kernels.layout import AttentionShape, shared_prefix_arrays
from plait.kernels.operators import Kernels
from plait.kernels.triton.support import HeadShape
from plait.runtime.adapters.adapter_pool import AdapterPool
from plait.runtime.adapters.torch_updates import TorchAdapters
from plait.runtime.arrays import IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.executor.backend_selection import resolve_dtype_name, torch_weight_format
from plait.runtime.executor.batch_arrays import AdapterRows, adapter_rows
from plait.runtime.executor.prefix_sharing import PrefixSharing
from plait.runtime.executor.runner import (
    DEFAULT_CPU_BATCH_TOKENS,
    MIN_PAGES,
    StartupProgress,
    choose_num_pages,
    warm_up,
)
from plait.runtime.executor.torch_device import choose_device, device_kv_cache_budget
from plait.runtime.executor.torch_inputs import ForwardInputs, upload_inputs
from plait.runtime.executor.torch_outputs import TorchOutputs
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.communicator import SINGLE, Communicator
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.decoder import Decoder
from plait.runtime.models.layers import StepUpdates
from plait.runtime.models.pipeline_stages import Stage
from plait.runtime.weights.checkpoint import open_checkpoint

DEFAULT_GPU_BATCH_TOKENS = 8192
LARGE_TILE_TOKENS = 64  # attention uses larger tiles for rows with more new tokens
# Tiles of quantized products are chosen by tokens and output channels: each doubling may be another one.
QUANTIZED_WARM_UP_COUNTS = (24, 48, 96, 192, 384, 768, 1536, 3072, 6144)
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchRunner(TorchOutputs):
    """Implements `Runner` with torch. Raises InputError for settings that the device or the model cannot serve.

    `kernels` replaces the operators chosen for the device; tests run the GPU's operators on the CPU this way.
    `RankRunner` overrides what differs in one rank of a model that several processes compute.
    """

    communicator: Communicator = SINGLE

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        progress: StartupProgress = lambda fraction, doing: None,
        kernels: Kernels | None = None,
    ) -> None:
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        checkpoint = self.open_weights(model_path)
        self.kernels = kernels or self._select_kernels(config, checkpoint.config)
        self.kv_dtype = self._check_kv_dtype(config.kv_dtype)
        self.weight_format = torch_weight_format(
            config, checkpoint, "cuda" if self.kernels.supports_quantized_weights else self.device.type
        )
        model_context_length = checkpoint.config.context_length
        self.context_length = min(config.context_length or model_context_length, model_context_length)
        # LongRoPE chooses its frequencies by the context length.
        self.config = replace(checkpoint.config, context_length=self.context_length)
        try:
            self.model = Decoder(
                self.config,
                checkpoint,
                self.kernels,
                self.dtype,
                self.device,
                lambda fraction: progress(0.9 * fraction, "loading the model"),
                self.weight_format,
                self.communicator,
                self.stage(checkpoint.config),
            )
        finally:
            checkpoint.close()
        super().__init__(self.device, self.model, self.config.vocab_size)
        self.adapter_pool: AdapterPool | None = None
        self.adapter_slots: TorchAdapters | None = None
        self._adapter_rows: AdapterRows | None = None  # of the latest batch
        if config.has_adapters:
            self.adapter_pool = AdapterPool(self.config, config.adapters, config.max_adapters, self._make_adapter_slots)
        self.max_batch_tokens = config.max_batch_tokens or (
            DEFAULT_GPU_BATCH_TOKENS if self.device.type == "cuda" else DEFAULT_CPU_BATCH_TOKENS
        )
        budget = config.kv_memory_bytes or self.kv_cache_budget() - self.missing_bytes
        self.allocate_pool(self.agree_on_pages(choose_num_pages(budget, self.page_bytes, self._most_pages(config))))
        groups, size = self.config.num_kv_heads, self.config.head_dim
        stored_dtype = cache_dtype(self.kv_dtype, self.dtype)
        windows = [self.config.window(i) for i in range(self.config.num_layers)]
        self.attention_shapes = tuple(
            AttentionShape(self.config.num_heads, groups, size, stored_dtype, window)
            for window in dict.fromkeys(windows[i] for i in self.model.stage.layers)
        )
        cost_of = (
            self.kernels.fused.prefix_sharing_cost if self.kernels.fused is not None and config.prefix_groups else None
        )
        self.prefix_sharing = (
            PrefixSharing(partial(cost_of, self.attention_shapes[0]), windows) if cost_of is not None else None
        )
        progress(0.9, "preparing kernels (the first start compiles them)")
        warm_up(self, self._warm_up_counts())

    def _make_adapter_slots(self, num_slots: int) -> TorchAdapters:
        self.adapter_slots = TorchAdapters(self.config, self.dtype, self.device, self.kernels, num_slots)
        return self.adapter_slots

    @property
    def missing_bytes(self) -> int:
        """The memory of adapters that are loaded later: twice their files, because a rank of 8 is padded to 16."""
        return 0 if self.adapter_pool is None else 2 * self.adapter_pool.missing_bytes

    has_launcher = True
    """Whether `gpu.step_launcher` runs the steps on a GPU."""

    def open_weights(self, model_path: Path) -> Checkpoint:
        """The weights that this runner computes with."""
        return open_checkpoint(model_path)

    def stage(self, config: ModelConfig) -> Stage:
        """The layers that this runner computes."""
        return Stage(0, config.num_layers, config.num_layers)

    def kv_cache_budget(self) -> int:
        """The bytes of the KV cache where the settings name none."""
        return device_kv_cache_budget(self.device)

    def agree_on_pages(self, num_pages: int) -> int:
        """The number of pages that every rank has, where this one could have `num_pages`."""
        return num_pages

    def _most_pages(self, config: EngineConfig) -> int:
        """A limit of the first pool, 0: none. On a GPU the launcher finds the pool's size by a trial, see
        `gpu.kv_pool_size`; until then it holds one batch."""
        is_trial = self.has_launcher and self.device.type == "cuda" and not config.kv_memory_bytes
        return config.max_pages or (max(MIN_PAGES, self.max_batch_tokens) if is_trial else 0)

    def allocate_pool(self, num_pages: int) -> None:
        """Replaces the KV cache by one of `num_pages` pages; 0 frees it. Graphs over the one before become invalid."""
        self.num_pages, self.max_session_tokens = num_pages, min(self.context_length, num_pages)
        self.kv_cache: list[LayerCache] = []
        groups, size = self.config.num_kv_heads, self.config.head_dim
        if num_pages:
            self.kv_cache = allocate_caches(
                self.kv_dtype, self.dtype, len(self.model.layers), num_pages, groups, size, self.device
            )

    def _select_kernels(self, config: EngineConfig, model: ModelConfig) -> Kernels:
        heads = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim)
        try:
            return select_kernels(self.device, self.dtype, config.deterministic, heads)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _warm_up_counts(self) -> tuple[int, ...]:
        """Token counts of the warm-up steps: one for each set of kernels that a step can launch."""
        if self.device.type != "cuda":
            return (2,)
        # Decode tiles of all heights, short prompts, long prompts. A tile's height is a power of two.
        counts: tuple[int, ...] = (1, 2, 4, 8, 9, 2 * LARGE_TILE_TOKENS)
        if self.weight_format != "bf16":
            counts += tuple(count for count in QUANTIZED_WARM_UP_COUNTS if count <= self.max_batch_tokens)
        return counts

    def _check_kv_dtype(self, kind: str) -> str:
        fused = self.kernels.fused
        if kind != "auto" and (fused is None or kind not in fused.kv_dtypes):
            attention = self.kernels.names["attention"]
            raise InputError(f"kv_dtype {kind!r} needs Triton's attention on a GPU; here attention is: {attention}")
        return kind

    @property
    def num_saved_reads(self) -> int:
        """As in `Runner`."""
        return 0 if self.prefix_sharing is None else self.prefix_sharing.num_saved_reads

    @property
    def page_bytes(self) -> int:
        """Bytes of one token's KV in all layers that this runner computes."""
        groups, size = self.config.num_kv_heads, self.config.head_dim
        return len(self.model.layers) * kv_slot_bytes(self.kv_dtype, self.dtype, groups, size)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """As in `Runner`."""
        return self.run_forward(self.prepare_inputs(batch))

    @torch.inference_mode()
    def run_forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Runs `forward` on prepared inputs, without access to the batch, whose rows may have changed since."""
        hidden, output_indices = self.run_layers(inputs), inputs.output_indices
        return hidden if len(output_indices) == len(hidden) else hidden[output_indices]

    def run_layers(self, inputs: ForwardInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """`Decoder.forward` of all new tokens: [T, C]."""
        layout = inputs.layout
        if self.kernels.fused is not None:
            layout = self.kernels.fused.with_plans(layout, self.attention_shapes)
        return self.model.forward(inputs.token_ids, layout, self.kv_cache, hidden, inputs.updates)

    def prepare_inputs(self, batch: Batch) -> ForwardInputs:
        """Starts copying the batch's arrays to the device."""
        inputs = upload_inputs(batch, self.device, self.shared_prefixes(batch))
        self._adapter_rows = self.adapter_rows(batch)
        if self._adapter_rows is None or self.adapter_slots is None:
            return inputs
        return inputs._replace(updates=self.adapter_slots.step(self._adapter_rows.of_tokens))

    def adapter_rows(self, batch: Batch) -> AdapterRows | None:
        """The slots of a batch's adapters; None if no row has one."""
        return None if self.adapter_pool is None else adapter_rows(batch, self.adapter_pool.slots)

    def head_updates(self, batch: Batch) -> StepUpdates | None:
        """What adapters add to the logits of a batch; None: nothing."""
        rows = self.adapter_rows(batch)
        return None if rows is None or self.adapter_slots is None else self.adapter_slots.of_head(rows.of_logits)

    def logits_of(
        self, hidden: torch.Tensor, rows: list[int] | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As in `TorchOutputs`, with what the rows' adapters add to the head."""
        if self._adapter_rows is None or self.adapter_slots is None:
            return super().logits_of(hidden, rows, columns)
        slots = self._adapter_rows.of_logits
        assert len(slots) == len(hidden)
        if rows is not None:
            hidden, slots = hidden[rows], slots[rows]
        return self.model.logits(hidden, columns, self.adapter_slots.of_head(slots))

    def shared_prefixes(self, batch: Batch) -> Sequence[IntArray]:
        """The arrays of the prefixes that rows of the batch read together; none without such rows."""
        counts = [request.count for request in batch.rows]
        groups = self.prefix_sharing.groups(batch.rows, max(counts)) if self.prefix_sharing is not None else []
        if self.prefix_sharing is not None and groups:
            self.prefix_sharing.count(groups)
        return shared_prefix_arrays(groups, counts) if groups else ()


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the torch dtype `name`; "auto" is resolved by `backend_selection.resolve_dtype_name`."""
    return TORCH_DTYPES[resolve_dtype_name(name, device.type)]
