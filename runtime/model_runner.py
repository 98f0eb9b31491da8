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

from plait.kernels.kv_cache import allocate_caches, cache_dtype, slot_bytes
from plait.kernels.layout import AttentionLayout, AttentionShape, SharedPrefixes, shared_arrays
from plait.kernels.select import Kernels, select_kernels
from plait.kernels.select_cuda import Heads
from plait.runtime.batch_arrays import batch_arrays, starts
from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError
from plait.runtime.host_logits import peaks
from plait.runtime.machine import spare_memory
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.decoders import MODELS
from plait.runtime.placing import dtype_name, torch_form
from plait.runtime.prefix_sharing import PrefixSharing
from plait.runtime.running import (
    CPU_BATCH_TOKENS,
    QUANTUM,
    Floats,
    Progress,
    Sums,
    choose_num_pages,
    warm_up,
)
from plait.runtime.scheduler.page_pool import IntArray
from plait.runtime.scheduler.rows import Batch
from plait.runtime.weights.checkpoint import open_checkpoint

GPU_BATCH_TOKENS = 8192
ALIGN = 4  # numbers of 4 bytes: 16 bytes
PROMPT_TOKENS = 64  # more of them in a row, and attention takes its larger tiles
NARROW_COUNTS = (24, 48, 640)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Inputs(NamedTuple):
    """Token ids [T], the places among them where hidden states are wanted, and the layout; all int32."""

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
        self.weight_form = torch_form(config, checkpoint, "cuda" if self.kernels.has_narrow else self.device.type)
        longest = checkpoint.config.context_length
        self.context_length = min(config.context_length or longest, longest)
        # LongRoPE has one set of frequencies for short contexts and one for long ones.
        self.config = replace(checkpoint.config, context_length=self.context_length)
        self.model = MODELS[self.config.architecture](
            self.config,
            checkpoint,
            self.kernels,
            self.dtype,
            self.device,
            lambda share: progress(0.9 * share, "loading the model"),
            self.weight_form,
        )
        self.max_batch_tokens = config.max_batch_tokens or (
            GPU_BATCH_TOKENS if self.device.type == "cuda" else CPU_BATCH_TOKENS
        )
        budget = config.kv_memory_bytes or free_memory(self.device)
        self.num_pages = choose_num_pages(budget, self.page_bytes, config.max_pages)
        self.max_session_tokens = min(self.context_length, self.num_pages)
        groups, size = self.config.num_kv_heads, self.config.head_dim
        self.kv_cache = allocate_caches(
            self.kv_dtype, self.dtype, self.config.num_layers, self.num_pages, groups, size, self.device
        )
        held = cache_dtype(self.kv_dtype, self.dtype)
        windows = [self.config.window(i) for i in range(self.config.num_layers)]
        self.attention_shapes = tuple(
            AttentionShape(self.config.num_heads, groups, size, held, window) for window in dict.fromkeys(windows)
        )
        rule = self.kernels.fused.prefix_sharing_cost if self.kernels.fused is not None and config.prefix_groups else None
        self.sharing = PrefixSharing(partial(rule, self.attention_shapes[0]), windows) if rule is not None else None
        progress(0.9, "preparing kernels (the first start compiles them)")
        warm_up(self, self._warm_counts())

    def _select_kernels(self, config: EngineConfig, model: ModelConfig) -> Kernels:
        heads = Heads(model.num_heads, model.num_kv_heads, model.head_dim)
        try:
            return select_kernels(self.device, self.dtype, config.deterministic, heads)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _warm_counts(self) -> tuple[int, ...]:
        """Numbers of tokens whose steps take kernels of their own."""
        if self.device.type != "cuda":
            return (2,)
        # short rows, short prompts and longer ones; narrow weights have a product for each of some ranges
        return (2, 9, 2 * PROMPT_TOKENS) + (NARROW_COUNTS if self.weight_form != "bf16" else ())

    def _check_kv_dtype(self, kind: str) -> str:
        fused = self.kernels.fused
        if kind != "auto" and (fused is None or kind not in fused.kv_dtypes):
            attention = self.kernels.names["attention"]
            raise InputError(f"kv_dtype {kind!r} needs Triton's attention on a GPU; here attention is: {attention}")
        return kind

    @property
    def num_spared_tokens(self) -> int:
        """See PrefixSharing.num_spared."""
        return 0 if self.sharing is None else self.sharing.num_spared

    @property
    def page_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        groups, size = self.config.num_kv_heads, self.config.head_dim
        return self.config.num_layers * slot_bytes(self.kv_dtype, self.dtype, groups, size)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """As `Runner` has it."""
        return self.compute(self.prepare_inputs(batch))

    @torch.inference_mode()
    def compute(self, inputs: Inputs) -> torch.Tensor:
        """`forward` of what `inputs` gave. Reads nothing of the batch: its rows may have changed since."""
        token_ids, wanted, layout = inputs
        if self.kernels.fused is not None:
            layout = self.kernels.fused.with_plans(layout, self.attention_shapes)
        hidden = self.model.forward(token_ids, layout, self.kv_cache)
        return hidden if len(wanted) == len(hidden) else hidden[wanted]

    @torch.inference_mode()
    def states(self, hidden: torch.Tensor, places: list[int]) -> Floats:
        """As `Runner` has it."""
        found: Floats = hidden[places].float().cpu().numpy()
        return found

    @torch.inference_mode()
    def total(self, hidden: torch.Tensor) -> Sums:
        """As `Runner` has it."""
        hidden = hidden if hidden.is_cuda else hidden.cpu()  # not every device has float64
        found: Sums = (hidden.float() / QUANTUM).round_().sum(dim=0, dtype=torch.float64).cpu().numpy()
        return found * QUANTUM

    def likeliest(self, hidden: torch.Tensor) -> tuple[list[float], list[int]]:
        """The largest logit of each of hidden states [n, C], NaN where one is that, and the first token that has it."""
        logits = self.logits(hidden, {})
        if self.device.type == "cpu":
            return peaks(logits.numpy())
        highest, places = logits.max(dim=-1)
        return highest.tolist(), places.tolist()

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

    def prepare_inputs(self, batch: Batch) -> Inputs:
        """The batch, on its way to the device. Token ids that are not known yet are negative, see BatchRow."""
        counts = [each.count for each in batch.rows]
        groups = self.sharing.groups(batch.rows, max(counts)) if self.sharing is not None else []
        if self.sharing is not None and groups:
            self.sharing.count(groups)
        parts = [*batch_arrays(batch), *(shared_arrays(groups, counts) if groups else ())]
        token_ids, wanted, q_starts, kv_starts, kv_pages, positions, writes, *shared = upload(parts, self.device)
        layout = AttentionLayout(
            q_starts,
            kv_starts,
            kv_pages,
            positions,
            writes,
            min_q_len=min(counts),
            max_q_len=max(counts),
            shared=SharedPrefixes(*shared) if shared else None,
        )
        return Inputs(token_ids, wanted, layout)


def upload(arrays: list[IntArray], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays on the device, by one copy that the host does not wait for.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for every mixture of those that do and do not.
    """
    places = starts([-(-len(each) // ALIGN) * ALIGN for each in arrays])
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
    """The torch dtype of that name; "auto" as `placing.dtype_name` has it."""
    return DTYPES[dtype_name(name, device.type)]


def cpu_has_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 natively on this CPU."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def free_memory(device: torch.device) -> int:
    """Bytes a KV cache may take when nothing was said: 85% of a GPU's free memory, an eighth of a computer's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left behind is free too
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.85)
    return spare_memory()
