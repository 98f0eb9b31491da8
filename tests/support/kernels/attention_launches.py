"""The attention kernels' launches for sm_80 and sm_90: layers, batches and caches of real models on `meta` tensors.

Each case calls the operator with the tile sizes of the architecture; `ptx_compile` compiles what it launches. Each kind
of kernel is compiled once (`_kind`), except that for sm_90 every kernel with matrix products is compiled that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from ptx_compile import ARCHITECTURES, Job, Launch, record_launches

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout, SharedPrefixes
from plait.kernels.operators import AttentionLayer
from plait.kernels.triton import rope_kv_write
from plait.kernels.triton.attention import cascade, decode, inputs, paged, split_kv_plan, tile_config

GPU_SPECS = {80: tile_config.GpuSpec(80, 108), 90: tile_config.GpuSpec(90, 132)}
TILE_CHOOSING_MODULES = (paged, split_kv_plan, decode, cascade, inputs)
MATRIX_KERNELS = {"_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel"}


@dataclass(frozen=True)
class Case:
    """A layer, a batch and a cache. Features of the operator that are not set are off."""

    dim: int
    group: int
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype | None = None
    page_size: int = 1
    q_len: int = 1  # 1: decode; more: prompts
    window: int | None = None
    softcap: float | None = None
    shared: bool = False
    kv_heads: int = 8
    rows: int = 16
    # The one architecture to compile for, if another case covers the registers and shared memory of the other.
    chips: tuple[int, ...] = ARCHITECTURES


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scales_of(case: Case, slots: int) -> dict[str, torch.Tensor]:
    if case.cache is None:
        return {}
    shape = (slots, case.kv_heads) if case.cache == torch.int8 else (1,)
    return {name: meta(*shape, dtype=torch.float32) for name in ("k_scale", "v_scale")}


def layout_of(case: Case) -> AttentionLayout:
    tokens = case.rows * case.q_len
    shared = SharedPrefixes(meta(case.rows), meta(case.rows), meta(3), meta(tokens), meta(2)) if case.shared else None
    starts = meta(case.rows + 1)
    return AttentionLayout(
        starts, starts, meta(4096), meta(tokens), meta(tokens), case.page_size, starts, case.q_len, case.q_len, shared
    )


def attend(case: Case) -> None:
    """Calls the attention operator once."""
    slots, layout = 65536, layout_of(case)
    q = meta(case.rows * case.q_len, case.kv_heads * case.group, case.dim, dtype=case.dtype)
    k, v = (meta(slots, case.kv_heads, case.dim, dtype=case.cache or case.dtype) for _ in range(2))
    cache = LayerCache(k, v, **scales_of(case, slots))
    paged.attend(q, AttentionLayer(cache, case.dim**-0.5, case.window, case.softcap), layout)


def write(case: Case, rotary_dim: int, norm: bool) -> None:
    """Calls the operator that applies rotary embeddings and writes KV once."""
    slots, layout = 65536, layout_of(case)
    qkv = meta(case.rows, case.kv_heads * (case.group + 2), case.dim, dtype=case.dtype)
    k, v = (meta(slots, case.kv_heads, case.dim, dtype=case.cache or case.dtype) for _ in range(2))
    cos, sin = (meta(8192, rotary_dim // 2, dtype=torch.float32) for _ in range(2))
    head_norm = meta(case.kv_heads * (case.group + 1), case.dim, dtype=case.dtype) if norm else None
    rope_kv_write.rotate_and_write(qkv, cos, sin, LayerCache(k, v, **scales_of(case, slots)), layout, head_norm, 1e-6)


def launches_on(arch: int, call: Callable[[], None]) -> list[Launch]:
    """Returns what `call` launches on that architecture."""
    for module in TILE_CHOOSING_MODULES:
        module.gpu_spec = lambda device: GPU_SPECS[arch]
    try:
        return record_launches(call)
    finally:
        for module in TILE_CHOOSING_MODULES:
            module.gpu_spec = tile_config.gpu_spec


BF16, F16, F32, FP8, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
CASES = {
    "Llama 3": Case(128, 4),
    "Llama 3, prompts": Case(128, 4, q_len=4096),
    "Llama 3, shared": Case(128, 4, shared=True, rows=64),
    "Llama 3, short prompts": Case(128, 4, q_len=12, chips=(80,)),
    "Llama 3, drafts": Case(128, 4, q_len=5, page_size=16, chips=(90,)),
    "fp8, shared": Case(128, 4, cache=FP8, shared=True),
    "int8": Case(128, 8, F16, cache=INT8, chips=(80,)),
    "int8, prompts": Case(128, 8, cache=INT8, page_size=32, q_len=4096, chips=(90,)),
    "int8, shared": Case(128, 8, cache=INT8, page_size=64, shared=True, chips=(90,)),
    "Gemma 2": Case(256, 2, window=4096, softcap=50.0, chips=(90,)),
    "Gemma 2, prompts": Case(256, 2, window=4096, softcap=50.0, q_len=4096),
    "Gemma 2, shared": Case(256, 2, window=4096, softcap=50.0, shared=True, kv_heads=4, chips=(90,)),
    "Gemma 3, fp8": Case(256, 4, cache=FP8, window=512, page_size=64, kv_heads=1),
    "Gemma 3, fp8 prompts": Case(256, 4, cache=FP8, window=512, kv_heads=1, q_len=1024),
    "SmolLM2": Case(64, 3, F16, kv_heads=3, chips=(90,)),
    "SmolLM2, prompts": Case(64, 3, F16, kv_heads=3, q_len=1024, chips=(80,)),
    "Phi-2's heads, prompts in big pages": Case(80, 1, kv_heads=32, q_len=4096, page_size=64, chips=(90,)),
    "96 channels": Case(96, 16, F16, kv_heads=2, chips=(90,)),
    "float32": Case(64, 2, F32, chips=(90,)),
    "float32, prompts": Case(128, 2, F32, q_len=100, chips=(90,)),
}
# Batch sizes that must run the kernels of their case; up to 16 rows share a prefix in smaller tiles.
SAME_KERNEL_SIZES = {"Llama 3": (1, 3), "Llama 3, prompts": (1, 3), "Llama 3, shared": (17, 48)}
OTHER_SIZES, FAULTY_CASE = "other sizes", "faulty"
WRITES = {
    "write": (Case(128, 4), 128, False),
    "write, Qwen 3": (Case(128, 4), 128, True),
    "write, fp8, part turns": (Case(80, 1, F16, cache=FP8), 32, False),
    "write, int8, norm": (Case(256, 4, cache=INT8, kv_heads=1), 256, True),
}


def jobs() -> list[Job]:
    """Every kernel with matrix products that differs for sm_90, and every kind of the others, once."""
    calls = [(name, case, partial(attend, case)) for name, case in CASES.items()]
    calls += [(name, case, partial(write, case, rotary_dim, norm)) for name, (case, rotary_dim, norm) in WRITES.items()]
    compiled: dict[tuple[int, str], Job] = {}
    launched = set[str]()  # on sm_90
    for name, case, call in calls:
        for arch in case.chips:
            for launch in launches_on(arch, call):
                must_differ = arch == 90 and launch.kernel.__name__ in MATRIX_KERNELS
                compiled.setdefault((arch, launch.key() if must_differ else _kind(launch)), job(name, launch, arch))
                if arch == 90:
                    launched.add(launch.key())
    for name, sizes in SAME_KERNEL_SIZES.items():
        for rows in sizes:
            for launch in launches_on(90, partial(attend, replace(CASES[name], rows=rows))):
                if launch.kernel.__name__ != "_plan_kernel" and launch.key() not in launched:
                    compiled.setdefault((90, launch.key()), job(f"{OTHER_SIZES} of {name}", launch, 90))
    return [*compiled.values(), faulty_job()]


def _kind(launch: Launch) -> str:
    """The kernel and the options that add or remove code; of kernels with matrix products also the tile's rows."""
    names = ("CACHE", "WINDOW", "SOFTCAP", "SHARED", "NORM")
    if launch.kernel.__name__ in MATRIX_KERNELS:
        names += ("GROUP", "BLOCK_M")
    return repr((launch.kernel.__name__, {name: launch.constants.get(name) for name in names}))


def job(name: str, launch: Launch, arch: int) -> Job:
    return Job(name, launch, arch, launch.kernel.__name__ in MATRIX_KERNELS)


def faulty_job() -> Job:
    """A decode kernel with too few registers and too many stages for the shared memory."""
    launches = launches_on(80, partial(attend, CASES["Llama 3"]))
    [launch] = [launch for launch in launches if launch.kernel.__name__ == "_decode_kernel"]
    return job(FAULTY_CASE, replace(launch, options={**launch.options, "num_stages": 8, "maxnreg": 64}), 80)
