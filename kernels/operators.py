"""The operator interface between models and kernels: signatures, and the tables of operators chosen for a device.

Implementations are in `reference/`, `triton/` and `cpu/`; `kernel_selection` chooses among them.
Shapes: T new tokens, H query heads, G key/value heads, D head size, C channels, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, AttentionShape, PrefixSharingCost
from plait.kernels.quantized_weights import LinearWeight, SimpleWeight
from plait.kernels.sampling_inputs import LogitAdjustments, SamplingInputs

# (x [T, K], weight [N, K], bias [N] or None) -> [T, N]
DenseLinearOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
LinearOp = Callable[[torch.Tensor, LinearWeight, torch.Tensor | None], torch.Tensor]

# (x, routing weights, expert ids, gate_up, down) -> [T, C], see reference.ops.experts
ExpertsOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# (logits [B, V], parameters, adjustments, out [B]) -> out, see reference_sampling.sample
SampleOp = Callable[[torch.Tensor, SamplingInputs, LogitAdjustments, torch.Tensor], torch.Tensor]


class RotateAndWriteOp(Protocol):
    """What is between the QKV projection and attention."""

    def __call__(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerCache,
        layout: AttentionLayout,
        head_norm: torch.Tensor | None,
        eps: float,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Head norm, rotary embedding and KV cache write: qkv [T, H + 2 G, D] -> queries [T, H, D], in `out` if given.

        cos and sin are whole tables [context, D // 2]. head_norm [H + G, D] repeats one weight for all queries, then
        one for all keys. Tokens with a negative write slot are not written.
        """


class AttentionLayer(NamedTuple):
    """What attention needs of one layer."""

    cache: LayerCache
    scale: float
    window: int | None = None  # sliding window in tokens
    softcap: float | None = None


# (q [T, H, D], layer, layout) -> [T, H, D], see reference.ops.paged_attention
PagedAttentionOp = Callable[[torch.Tensor, AttentionLayer, AttentionLayout], torch.Tensor]


class CacheAttentionOp(Protocol):
    """Attention of queries over a KV cache in any of its dtypes."""

    def __call__(
        self, q: torch.Tensor, layer: AttentionLayer, layout: AttentionLayout, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attends with q [T, H, D]; returns [T, H, D], in `out` if given. Rows without tokens are skipped."""


# (q [T, H, D], layout, out [T, H, D]) -> the attention of each layer, which is called in the order of the layers
BoundAttention = Callable[[torch.Tensor, AttentionLayout, torch.Tensor], Sequence[Callable[[], None]]]


class AddRMSNormOp(Protocol):
    """Residual addition fused with the RMSNorm that follows it."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x [T, C] to residual in place and returns the norm of the sum, see `reference_float32.add_rms_norm`."""


class AddLowRankOp(Protocol):
    """What adapters add to a product."""

    def __call__(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        table: torch.Tensor,
        product: int,
        groups: ExpertRouting,
        num_terms: int,
    ) -> None:
        """Adds to out [T, N] the updates that `low_rank_table` has of a product of x [T, K], for each row that of its
        adapter; x [T] are token ids, of whose embeddings `out` has the rows.

        groups: of the rows, by `group_rows`. num_terms: as many as any update has, or more.
        """


@dataclass(frozen=True)
class FusedOperators:
    """Operators that a GPU runs as one kernel where the CPU composes several.

    The Triton implementations never read from the device or wait for it, so a step can be captured in a CUDA graph.
    """

    rotate_and_write: RotateAndWriteOp
    attention: CacheAttentionOp
    add_rms_norm: AddRMSNormOp
    with_plans: Callable[[AttentionLayout, tuple[AttentionShape, ...]], AttentionLayout]  # once per forward
    make_sampler: Callable[[int, int, torch.device], SampleOp]  # (rows, vocab, device); allocates the workspace
    count_tokens: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # see reference_sampling.count_tokens
    gather_logprobs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # see reference_sampling
    top_logprobs: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]  # see reference_sampling
    group_rows: Callable[[torch.Tensor, int], ExpertRouting]  # (slots [T] of a step's adapters or -1, their number)
    add_low_rank: AddLowRankOp
    bind_attention: Callable[[Sequence[AttentionLayer]], BoundAttention]  # (layers whose caches stay in place)
    kv_dtypes: frozenset[str]  # supported values of `kv_dtype` besides "auto"
    # (shape, most new tokens of a row): when shared prefixes are worth a pass of their own; None: never
    prefix_sharing_cost: Callable[[AttentionShape, int], PrefixSharingCost] | None = None


@dataclass(frozen=True)
class Kernels:
    """The operators that a model calls; signatures and semantics as in `reference.ops`.

    `linear` and `dequantize_rows` take weights in any format if quantized ones are supported, else tensors only.
    """

    linear: LinearOp
    dequantize_rows: Callable[[SimpleWeight, torch.Tensor, torch.dtype], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rms_norm_in_place: Callable[[torch.Tensor, torch.Tensor, float], None]
    silu_and_multiply: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_and_multiply: Callable[[torch.Tensor], torch.Tensor]
    soft_cap_in_place: Callable[[torch.Tensor, float], None]
    experts: ExpertsOp
    paged_attention: PagedAttentionOp
    names: dict[str, str]  # operator -> chosen implementation, printed by `plait check`
    fused: FusedOperators | None = None  # None: the model composes the operators above
    supports_quantized_weights: bool = False  # whether there are products with 4- and 8-bit weights


class ExpertRouting(NamedTuple):
    """Which rows each block of a grouped matrix product multiplies. A slot is token * top_k + choice.

    The slots of each expert, in rising order, fill whole blocks; unused entries of its last block hold `num_slots`.
    Unused blocks have expert -1 and arbitrary slots.
    """

    slots: torch.Tensor  # [blocks * block] int32
    block_experts: torch.Tensor  # [blocks] int32
    block: int  # slots per block
    num_slots: int  # tokens * top_k


def max_num_blocks(num_slots: int, num_experts: int, block: int) -> int:
    """An upper bound on the blocks that any routing of `num_slots` slots needs."""
    return max(1, min(num_slots, (num_slots + min(num_slots, num_experts) * (block - 1)) // block))


def qk_norm_weights(
    head_norm: torch.Tensor | None, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Returns the query and key weights [D] of head_norm [H + G, D]."""
    return (None, None) if head_norm is None else (head_norm[0], head_norm[num_heads])
