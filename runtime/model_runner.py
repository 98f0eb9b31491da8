"""Owns the model and the KV cache, and turns a batch of rows into one ragged forward.

Knows: tensors, devices, memory. Must not know: sessions, sampling, the wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from plait.kernels.kv_cache import allocate_caches, cache_dtype, slot_bytes
from plait.kernels.layout import AttentionLayout, AttentionShape
from plait.kernels.select import Kernels, select_kernels
from plait.kernels.select_cuda import Heads
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.forms import load_model
from plait.runtime.scheduler.page_pool import IntArray
from plait.runtime.scheduler.rows import Batch, Row
from plait.runtime.scheduler.sequence import Sequence
from plait.runtime.weights.checkpoint import open_checkpoint

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 256, 8192
MIN_PAGES = 16
Progress = Callable[[float, str], None]  # share done, from 0 to 1, and what is being done
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Inputs(NamedTuple):
    """Token ids [T], the places among them where logits are wanted [num_logits], and the layout; all int32."""

    token_ids: torch.Tensor
    wanted: torch.Tensor
    layout: AttentionLayout


class ModelRunner:
    """One model on one device. `num_pages` pages, each holding one token's KV in every layer.

    `kernels`: other operators than those the device would get (tests run a GPU's on the CPU so).
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        progress: Progress = lambda share, doing: None,
        kernels: Kernels | None = None,
    ) -> None:
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        checkpoint = open_checkpoint(model_path)
        self.kernels = kernels or self._select_kernels(config, checkpoint.config)
        self.kv_dtype = self._check_kv_dtype(config.kv_dtype)
        longest = checkpoint.config.context_length
        self.context_length = min(config.context_length or longest, longest)
        # LongRoPE has one set of frequencies for short contexts and one for long ones.
        self.config = replace(checkpoint.config, context_length=self.context_length)
        self.model = load_model(
            self.config,
            checkpoint,
            self.kernels,
            self.dtype,
            self.device,
            config.weights,
            config.deterministic,
            lambda share: progress(0.9 * share, "loading the model"),
        )
        self.max_batch_tokens = config.max_batch_tokens or (
            GPU_BATCH_TOKENS if self.device.type == "cuda" else CPU_BATCH_TOKENS
        )
        self.num_pages = self._choose_num_pages(config)
        self.max_session_tokens = min(self.context_length, self.num_pages)
        groups, size = self.config.num_kv_heads, self.config.head_dim
        self.kv_cache = allocate_caches(
            self.kv_dtype, self.dtype, self.config.num_layers, self.num_pages, groups, size, self.device
        )
        held = cache_dtype(self.kv_dtype, self.dtype)
        windows = dict.fromkeys(self.config.window(i) for i in range(self.config.num_layers))
        self.attention_shapes = tuple(
            AttentionShape(self.config.num_heads, groups, size, held, window) for window in windows
        )
        progress(0.9, "preparing kernels (the first start compiles them)")
        self._warm_up()

    def _select_kernels(self, config: EngineConfig, model: ModelConfig) -> Kernels:
        heads = Heads(model.num_heads, model.num_kv_heads, model.head_dim)
        try:
            return select_kernels(self.device, self.dtype, config.deterministic, heads)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _check_kv_dtype(self, kind: str) -> str:
        fused = self.kernels.fused
        if kind != "auto" and (fused is None or kind not in fused.kv_dtypes):
            attention = self.kernels.names["attention"]
            raise InputError(f"kv_dtype {kind!r} needs Triton's attention on a GPU; here attention is: {attention}")
        return kind

    def _warm_up(self) -> None:
        """One small forward, so that kernels are compiled and loaded before the first request."""
        seq = Sequence(("", ""), [0, 0])
        seq.pages.extend([0, 1])
        batch = Batch(2)
        batch.add(Row(None, seq, 0, 1), 0, 2)
        self.logits(self.forward(batch), {})

    @property
    def page_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        groups, size = self.config.num_kv_heads, self.config.head_dim
        return self.config.num_layers * slot_bytes(self.kv_dtype, self.dtype, groups, size)

    def _choose_num_pages(self, config: EngineConfig) -> int:
        budget = config.kv_memory_bytes or free_memory(self.device)
        pages = budget // self.page_bytes
        if config.max_pages:
            pages = min(pages, config.max_pages)
        if pages < MIN_PAGES:
            raise InputError(
                f"a KV budget of {budget} bytes holds {pages} tokens; at least {MIN_PAGES} "
                f"({MIN_PAGES * self.page_bytes} bytes) are needed: raise kv_memory_bytes or max_pages"
            )
        return int(pages)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [batch.num_logits, C] for the positions the rows want logits at, in row order."""
        return self.compute(self.inputs(batch))

    @torch.inference_mode()
    def compute(self, inputs: Inputs) -> torch.Tensor:
        """`forward` of what `inputs` gave. Reads nothing of the batch: its rows may have changed since."""
        token_ids, wanted, layout = inputs
        if self.kernels.fused is not None:
            layout = self.kernels.fused.with_plans(layout, self.attention_shapes)
        hidden = self.model.forward(token_ids, layout, self.kv_cache)
        return hidden if len(wanted) == len(hidden) else hidden[wanted]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, narrow: Mapping[int, npt.NDArray[np.int64]]) -> torch.Tensor:
        """Logits [n, V] float32 of hidden states [n, C].

        `narrow[i]` are the only token ids that row i can take: only those columns of the output head are computed,
        the others are -inf. The head is a third of a small model's step.
        """
        if not len(hidden):
            return torch.empty((0, self.config.vocab_size), device=self.device)
        if not narrow:
            return self.model.logits(hidden)
        out = torch.full((len(hidden), self.config.vocab_size), float("-inf"), device=self.device)
        wide = [i for i in range(len(hidden)) if i not in narrow]
        if wide:
            out[wide] = self.model.logits(hidden[wide])
        for i, ids in narrow.items():
            columns = torch.from_numpy(ids).to(self.device)
            out[i, columns] = self.model.logits(hidden[i : i + 1], columns)[0]
        return out

    def inputs(self, batch: Batch) -> Inputs:
        """The batch, on its way to the device. Token ids that are not known yet are negative, see BatchRow."""
        rows = batch.rows
        ends = [each.start + each.count for each in rows]
        pages = [each.pages() for each in rows]
        counts = [each.count for each in rows]
        parts = [
            batch.token_ids(),
            _logit_positions(batch),
            _starts(counts),
            _starts(ends),
            np.concatenate(pages),
            np.concatenate([np.arange(each.start, end, dtype=np.int32) for each, end in zip(rows, ends, strict=True)]),
            np.concatenate([p[each.start :] for each, p in zip(rows, pages, strict=True)]),
        ]
        token_ids, wanted, q_starts, kv_starts, kv_pages, positions, writes = upload(parts, self.device)
        layout = AttentionLayout(
            q_starts, kv_starts, kv_pages, positions, writes, min_q_len=min(counts), max_q_len=max(counts)
        )
        return Inputs(token_ids, wanted, layout)


def upload(arrays: list[IntArray], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays on the device, by one copy that the host does not wait for."""
    whole = torch.empty(sum(map(len, arrays)), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=whole.numpy())
    return list(torch.split(whole.to(device, non_blocking=True), [len(each) for each in arrays]))


def _logit_positions(batch: Batch) -> IntArray:
    """Indices among the batch's tokens."""
    found, at = [], 0
    for each in batch.rows:
        at += each.count
        found.append(np.arange(at - each.num_logits, at, dtype=np.int32))
    return np.concatenate(found)


def _starts(lengths: list[int]) -> IntArray:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


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
    """ "auto": bfloat16 on GPUs and on CPUs that compute it natively, else float32."""
    if name != "auto":
        return DTYPES[name]
    native = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def free_memory(device: torch.device) -> int:
    """Bytes a KV cache may take when nothing was said: 85% of a GPU's free memory, an eighth of a computer's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left behind is free too
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.85)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 8, 1 << 30)
