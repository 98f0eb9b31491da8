"""Owns a model that torch runs and its KV cache, and turns a batch of rows into one ragged forward.

Knows: tensors, devices, memory. Must not know: sessions, sampling, the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from plait.kernels.kernel_selection import Kernels, select_kernels
from plait.kernels.kv_cache import allocate_caches, cache_dtype, kv_slot_bytes
from plait.kernels.layout import AttentionLayout, AttentionShape, SharedPrefixes, shared_prefix_arrays
from plait.kernels.triton.support import HeadShape
from plait.runtime.arrays import Float32Array, Float64Array, IntArray
from plait.runtime.batch.batch import Batch
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.executor.backend_selection import resolve_dtype_name, torch_weight_format
from plait.runtime.executor.batch_arrays import batch_arrays, starts
from plait.runtime.executor.host_machine import host_kv_cache_budget
from plait.runtime.executor.prefix_sharing import PrefixSharing
from plait.runtime.executor.runner import (
    DEFAULT_CPU_BATCH_TOKENS,
    SUM_QUANTUM,
    StartupProgress,
    choose_num_pages,
    warm_up,
)
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.decoders import MODELS
from plait.runtime.sampling.numpy_ops import row_argmax
from plait.runtime.weights.checkpoint import open_checkpoint

DEFAULT_GPU_BATCH_TOKENS = 8192
UPLOAD_ALIGN = 4  # numbers of 4 bytes: 16 bytes
LARGE_TILE_TOKENS = 64  # more of them in a row, and attention takes its larger tiles
QUANTIZED_WARM_UP_COUNTS = (24, 48, 640)
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ForwardInputs(NamedTuple):
    """Token ids [T], the places among them where hidden states are wanted, and the layout; all int32."""

    token_ids: torch.Tensor
    output_indices: torch.Tensor
    layout: AttentionLayout


class TorchRunner:
    """One model on one device. `num_pages` pages, each holding one token's KV in every layer.

    `kernels`: other operators than those the device would get (tests run a GPU's on the CPU so).
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        progress: StartupProgress = lambda fraction, doing: None,
        kernels: Kernels | None = None,
    ) -> None:
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        checkpoint = open_checkpoint(model_path)
        self.kernels = kernels or self._select_kernels(config, checkpoint.config)
        self.kv_dtype = self._check_kv_dtype(config.kv_dtype)
        self.weight_format = torch_weight_format(
            config, checkpoint, "cuda" if self.kernels.supports_quantized_weights else self.device.type
        )
        model_context_length = checkpoint.config.context_length
        self.context_length = min(config.context_length or model_context_length, model_context_length)
        # LongRoPE has one set of frequencies for short contexts and one for long ones.
        self.config = replace(checkpoint.config, context_length=self.context_length)
        self.model = MODELS[self.config.architecture](
            self.config,
            checkpoint,
            self.kernels,
            self.dtype,
            self.device,
            lambda fraction: progress(0.9 * fraction, "loading the model"),
            self.weight_format,
        )
        self.max_batch_tokens = config.max_batch_tokens or (
            DEFAULT_GPU_BATCH_TOKENS if self.device.type == "cuda" else DEFAULT_CPU_BATCH_TOKENS
        )
        budget = config.kv_memory_bytes or device_kv_cache_budget(self.device)
        self.num_pages = choose_num_pages(budget, self.page_bytes, config.max_pages)
        self.max_session_tokens = min(self.context_length, self.num_pages)
        groups, size = self.config.num_kv_heads, self.config.head_dim
        self.kv_cache = allocate_caches(
            self.kv_dtype, self.dtype, self.config.num_layers, self.num_pages, groups, size, self.device
        )
        stored_dtype = cache_dtype(self.kv_dtype, self.dtype)
        windows = [self.config.window(i) for i in range(self.config.num_layers)]
        self.attention_shapes = tuple(
            AttentionShape(self.config.num_heads, groups, size, stored_dtype, window)
            for window in dict.fromkeys(windows)
        )
        cost_of = (
            self.kernels.fused.prefix_sharing_cost if self.kernels.fused is not None and config.prefix_groups else None
        )
        self.prefix_sharing = (
            PrefixSharing(partial(cost_of, self.attention_shapes[0]), windows) if cost_of is not None else None
        )
        progress(0.9, "preparing kernels (the first start compiles them)")
        warm_up(self, self._warm_up_counts())

    def _select_kernels(self, config: EngineConfig, model: ModelConfig) -> Kernels:
        heads = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim)
        try:
            return select_kernels(self.device, self.dtype, config.deterministic, heads)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _warm_up_counts(self) -> tuple[int, ...]:
        """Numbers of tokens whose steps take kernels of their own."""
        if self.device.type != "cuda":
            return (2,)
        # short rows, short prompts and longer ones; narrow weights have a product for each of some ranges
        return (2, 9, 2 * LARGE_TILE_TOKENS) + (QUANTIZED_WARM_UP_COUNTS if self.weight_format != "bf16" else ())

    def _check_kv_dtype(self, kind: str) -> str:
        fused = self.kernels.fused
        if kind != "auto" and (fused is None or kind not in fused.kv_dtypes):
            attention = self.kernels.names["attention"]
            raise InputError(f"kv_dtype {kind!r} needs Triton's attention on a GPU; here attention is: {attention}")
        return kind

    @property
    def num_spared_tokens(self) -> int:
        """See PrefixSharing.num_spared."""
        return 0 if self.prefix_sharing is None else self.prefix_sharing.num_spared

    @property
    def page_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        groups, size = self.config.num_kv_heads, self.config.head_dim
        return self.config.num_layers * kv_slot_bytes(self.kv_dtype, self.dtype, groups, size)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """As `Runner` has it."""
        return self.run_forward(self.prepare_inputs(batch))

    @torch.inference_mode()
    def run_forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """`forward` of what `inputs` gave. Reads nothing of the batch: its rows may have changed since."""
        token_ids, output_indices, layout = inputs
        if self.kernels.fused is not None:
            layout = self.kernels.fused.with_plans(layout, self.attention_shapes)
        hidden = self.model.forward(token_ids, layout, self.kv_cache)
        return hidden if len(output_indices) == len(hidden) else hidden[output_indices]

    @torch.inference_mode()
    def hidden_states_at(self, hidden: torch.Tensor, places: list[int]) -> Float32Array:
        """As `Runner` has it."""
        found: Float32Array = hidden[places].float().cpu().numpy()
        return found

    @torch.inference_mode()
    def sum_hidden_states(self, hidden: torch.Tensor) -> Float64Array:
        """As `Runner` has it."""
        hidden = hidden if hidden.is_cuda else hidden.cpu()  # not every device has float64
        found: Float64Array = (hidden.float() / SUM_QUANTUM).round_().sum(dim=0, dtype=torch.float64).cpu().numpy()
        return found * SUM_QUANTUM

    def argmax_tokens(self, hidden: torch.Tensor) -> tuple[list[float], list[int]]:
        """The largest logit of each of hidden states [n, C], NaN where one is that, and the first token that has it."""
        logits = self.logits(hidden, {})
        if self.device.type == "cpu":
            return row_argmax(logits.numpy())
        highest, places = logits.max(dim=-1)
        return highest.tolist(), places.tolist()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, allowed_ids: Mapping[int, npt.NDArray[np.int64]]) -> torch.Tensor:
        """Logits [n, V] float32 of hidden states [n, C].

        `allowed_ids[i]` are the only token ids that row i can take: only those columns of the output head are computed,
        the others are -inf. The head is a third of a small model's step.
        """
        if not len(hidden):
            return torch.empty((0, self.config.vocab_size), device=self.device)
        if not allowed_ids:
            return self.model.logits(hidden)
        out = torch.full((len(hidden), self.config.vocab_size), float("-inf"), device=self.device)
        wide = [i for i in range(len(hidden)) if i not in allowed_ids]
        if wide:
            out[wide] = self.model.logits(hidden[wide])
        for i, ids in allowed_ids.items():
            columns = torch.from_numpy(ids).to(self.device)
            out[i, columns] = self.model.logits(hidden[i : i + 1], columns)[0]
        return out

    def prepare_inputs(self, batch: Batch) -> ForwardInputs:
        """The batch, on its way to the device. Token ids that are not known yet are negative, see ScheduledRequest."""
        counts = [each.count for each in batch.rows]
        groups = self.prefix_sharing.groups(batch.rows, max(counts)) if self.prefix_sharing is not None else []
        if self.prefix_sharing is not None and groups:
            self.prefix_sharing.count(groups)
        parts = [*batch_arrays(batch), *(shared_prefix_arrays(groups, counts) if groups else ())]
        token_ids, output_indices, q_starts, kv_starts, kv_pages, positions, write_slots, *shared = upload(
            parts, self.device
        )
        layout = AttentionLayout(
            q_starts,
            kv_starts,
            kv_pages,
            positions,
            write_slots,
            min_q_len=min(counts),
            max_q_len=max(counts),
            shared=SharedPrefixes(*shared) if shared else None,
        )
        return ForwardInputs(token_ids, output_indices, layout)


def upload(arrays: list[IntArray], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays on the device, by one copy that the host does not wait for.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for every mixture of those that do and do not.
    """
    places = starts([-(-len(each) // UPLOAD_ALIGN) * UPLOAD_ALIGN for each in arrays])
    whole = torch.empty(int(places[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = whole.numpy()
    for at, each in zip(places, arrays, strict=False):
        host[at : at + len(each)] = each
    sent = whole.to(device, non_blocking=True)
    return [sent[at : at + len(each)] for at, each in zip(places.tolist(), arrays, strict=False)]


def choose_device(name: str) -> torch.device:
    """The torch device of that name; "auto" takes CUDA where there is one, else the CPU. InputError if it is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0][:120]
        raise InputError(f"device {name!r} cannot be used here ({first}); `plait check` shows what can") from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of that name; "auto" as `placing.resolve_dtype_name` has it."""
    return TORCH_DTYPES[resolve_dtype_name(name, device.type)]


def cpu_has_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 natively on this CPU."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def device_kv_cache_budget(device: torch.device) -> int:
    """Bytes a KV cache may take when nothing was said: 85% of a GPU's free memory, an eighth of a computer's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left behind is free too
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.85)
    return host_kv_cache_budget()
