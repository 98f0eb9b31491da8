"""Compiles the attention kernels for real, with no GPU, for sm_80 and sm_90, and says what came of it.

    python attention_compile.py PART PARTS       prints one JSON line per kernel compiled
    python attention_compile.py spoilt           the same of a kernel that has every fault

A case calls the operator on `meta` tensors with the block shapes of the architecture; its launches are caught and
compiled as they would have been. Runs where TRITON_INTERPRET is not set. Knows: Triton's compiler, the operators.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from plait.kernels.layout import AttentionLayout, SharedPrefixes
from plait.kernels.triton import (
    attention,
    attention_cascade,
    attention_config,
    attention_decode,
    attention_inputs,
    attention_plan,
    kv_write,
)

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes of a block, CUDA C++ Programming Guide, compute capabilities
CHIPS = {80: attention_config.Chip(80, 108), 90: attention_config.Chip(90, 132)}
MATRIX_KERNELS = {"_decode_kernel", "_extend_kernel", "_prefix_kernel"}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "uint8": "u8", "int8": "i8", "int32": "i32"}


@dataclass(frozen=True)
class Case:
    """A layer, a batch and a cache; what of the operator they do not mention is off."""

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
    chips: tuple[int, ...] = (80, 90)  # one where its registers and shared memory are no tighter than another case's


@dataclass(frozen=True)
class Report:
    """One kernel compiled for one architecture."""

    case: str
    kernel: str
    arch: int
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    tensor_core: str  # "wgmma", "mma" or ""
    copies_of_16: int  # asynchronous copies in the PTX, by their bytes
    copies_of_less: int

    def faults(self) -> list[str]:
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled} bytes")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"needs {self.shared} bytes of shared memory")
        if self.kernel in MATRIX_KERNELS and not self.tensor_core:
            found.append("uses no tensor cores")
        return found


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
    """Calls the operator once."""
    slots, layout = 65536, layout_of(case)
    q = meta(case.rows * case.q_len, case.kv_heads * case.group, case.dim, dtype=case.dtype)
    k, v = (meta(slots, case.kv_heads, case.dim, dtype=case.cache or case.dtype) for _ in range(2))
    attention.paged_attention(
        q, k, v, layout, case.dim**-0.5, case.window, softcap=case.softcap, **scales_of(case, slots)
    )


def write(case: Case, turning: int, norm: bool) -> None:
    slots, layout = 65536, layout_of(case)
    qkv = meta(case.rows, case.kv_heads * (case.group + 2), case.dim, dtype=case.dtype)
    k, v = (meta(slots, case.kv_heads, case.dim, dtype=case.cache or case.dtype) for _ in range(2))
    cos, sin = (meta(8192, turning // 2, dtype=torch.float32) for _ in range(2))
    weight = meta(case.dim, dtype=case.dtype) if norm else None
    kv_write.rotary_write_kv(qkv, cos, sin, k, v, layout, q_norm=weight, k_norm=weight, **scales_of(case, slots))


@dataclass
class Launch:
    """One caught launch."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, int]


def launch_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Types, constants and alignments as Triton's launcher would find them in these arguments."""
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    launch = Launch(kernel, {}, {}, {}, options)
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        special = not param.do_not_specialize
        if param.is_constexpr or (special and type(value) is int and value == 1):
            launch.signature[param.name], launch.constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            launch.signature[param.name] = "*" + TYPES[str(value.dtype).removeprefix("torch.")]
            launch.attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            launch.signature[param.name] = "i32" if isinstance(value, int) else "fp32"
            if special and isinstance(value, int) and value % 16 == 0:
                launch.attributes[(i,)] = [["tt.divisibility", 16]]
    return launch


def caught(call: Callable[[], None], arch: int) -> list[Launch]:
    """What `call` launches on that architecture."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(size > 0 for size in grid), f"{self.__name__} launched with the grid {grid}"
        launches.append(launch_of(self, args, kwargs))

    modules = (attention, attention_plan, attention_decode, attention_cascade, attention_inputs)
    originals = JITFunction.run, attention_config.chip_of
    JITFunction.run = run
    for module in modules:
        module.chip_of = lambda device: CHIPS[arch]
    try:
        call()
    finally:
        JITFunction.run = originals[0]
        for module in modules:
            module.chip_of = originals[1]
    return launches


def report(case: str, launch: Launch, arch: int) -> Report:
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    text, ptx = log.getvalue(), binary.asm["ptx"]
    registers, spills = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert registers and spills, f"ptxas said nothing of registers: {text}"
    cores = next((kind for kind in ("wgmma", "mma") if re.search(rf"\b{kind}(\.mma_async)?\.sync", ptx)), "")
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (?:0x)?(\w+)", ptx)
    wide = sum(int(size, 16) in (0x10, 0x16) for size in sizes)
    return Report(
        case,
        launch.kernel.__name__,
        arch,
        int(registers[1]),
        int(spills[1]),
        binary.metadata.shared,
        cores,
        wide,
        len(sizes) - wide,
    )


BF16, F16, F32, FP8, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
CASES = {
    "Llama 3": Case(128, 4),
    "Llama 3, prompts": Case(128, 4, q_len=4096),
    "Llama 3, shared": Case(128, 4, shared=True, rows=64),
    "Llama 3, short prompts": Case(128, 4, q_len=12, chips=(80,)),
    "Llama 3, drafts": Case(128, 4, q_len=5, page_size=16, chips=(90,)),
    "big pages": Case(128, 8, page_size=64, chips=(80,)),
    "big pages, prompts": Case(128, 8, page_size=64, q_len=4096, chips=(90,)),
    "big pages, shared": Case(128, 8, page_size=64, shared=True, chips=(80,)),
    "fp8": Case(128, 4, cache=FP8, page_size=16),
    "fp8, prompts": Case(128, 4, cache=FP8, q_len=4096),
    "fp8, shared": Case(128, 4, cache=FP8, shared=True),
    "int8": Case(128, 8, F16, cache=INT8),
    "int8, prompts": Case(128, 8, cache=INT8, page_size=32, q_len=4096),
    "int8, shared": Case(128, 8, cache=INT8, shared=True),
    "Gemma 2": Case(256, 2, window=4096, softcap=50.0),
    "Gemma 2, prompts": Case(256, 2, window=4096, softcap=50.0, q_len=4096),
    "Gemma 2, shared": Case(256, 2, window=4096, softcap=50.0, shared=True, kv_heads=4),
    "Gemma 3, fp8": Case(256, 4, cache=FP8, window=512, page_size=64, kv_heads=1),
    "Gemma 3, fp8 prompts": Case(256, 4, cache=FP8, window=512, kv_heads=1, q_len=1024),
    "SmolLM2": Case(64, 3, F16, kv_heads=3, chips=(90,)),
    "SmolLM2, prompts": Case(64, 3, F16, kv_heads=3, q_len=1024, chips=(80,)),
    "Phi-2's heads": Case(80, 1, kv_heads=32, chips=(80,)),
    "Phi-2's heads, prompts": Case(80, 1, kv_heads=32, q_len=4096, page_size=2, chips=(90,)),
    "96 channels": Case(96, 16, F16, kv_heads=2, chips=(90,)),
    "96 channels, prompts": Case(96, 16, F16, kv_heads=2, q_len=300, window=128, chips=(80,)),
    "one KV head, int8, window": Case(64, 16, cache=INT8, kv_heads=1, window=256, chips=(90,)),
    "Mistral, prompts": Case(128, 4, window=4096, q_len=4096, chips=(80,)),
    "float32": Case(64, 2, F32),
    "float32, prompts": Case(128, 2, F32, q_len=100),
}
WRITES = {
    "write": (Case(128, 4), 128, False),
    "write, Qwen 3": (Case(128, 4), 128, True),
    "write, fp8, part turns": (Case(80, 1, F16, cache=FP8), 32, False),
    "write, int8, norm": (Case(256, 4, cache=INT8, kv_heads=1), 256, True),
}


def jobs() -> list[tuple[str, Launch, int]]:
    """Every kernel that differs, once."""
    calls = [(name, case, partial(attend, case)) for name, case in CASES.items()]
    calls += [(name, case, partial(write, case, turning, norm)) for name, (case, turning, norm) in WRITES.items()]
    found: dict[str, tuple[str, Launch, int]] = {}
    for name, case, call in calls:
        for arch in case.chips:
            for launch in caught(call, arch):
                found.setdefault(repr((arch, launch)), (name, launch, arch))
    return list(found.values())


def spoilt() -> Report:
    """Prompts in tiles that two warps cannot hold, six stages deep; and said to be without products."""
    attention.extend_blocks = lambda chip, shape, most: attention_config.Blocks(64, 32, warps=2, stages=6)
    launches = caught(partial(attend, Case(256, 4, q_len=4096)), 80)
    [launch] = [each for each in launches if each.kernel.__name__ == "_extend_kernel"]
    return replace(report("spoilt", launch, 80), tensor_core="")


def main(arguments: list[str]) -> None:
    triton.knobs.nvidia.dump_ptxas_log = True
    if arguments == ["spoilt"]:
        found = [spoilt()]
    else:
        part, parts = map(int, arguments)
        found = (report(*job) for job in jobs()[part::parts])
    for each in found:
        print(json.dumps({**asdict(each), "faults": each.faults()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
