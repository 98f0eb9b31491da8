"""Measures loading checkpoints as the GPU path does, with host memory in the place of the GPU's.

    python benchmarks/loading_checkpoints.py [--kinds fp8 gptq ranks] [--gguf FILE] [--gigabytes 2] [--folder FOLDER]

Every kind is a random checkpoint with the matrices of Llama-3-8B, which is deleted at the end; "ranks" is a folder in
bf16 of which two ranks read their halves, one after the other. Prints GB/s (10^9 bytes of the file) from the page
cache, the median of three: of the complete load, in which this CPU also does what a GPU does with the bytes, and of the
reading alone. Freed memory is used again, as by torch on a GPU, if the environment has MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=99999999999.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from plait.runtime.models.loading.torch_weights import TorchWeightLoader
from plait.runtime.models.weight_split import Rank
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.parallel_read import ParallelReader
from plait.runtime.weights.rank_checkpoint import open_rank_checkpoint

REPEATS = 3
GROUP = 128
CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=1024, hidden_size=4096)
CONFIG |= dict(intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)
CONFIG |= dict(rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", tie_word_embeddings=True)
MATRICES = {
    f"self_attn.{part}_proj": (rows, 4096) for part, rows in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096))
}
MATRICES |= {"mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096), "mlp.down_proj": (4096, 14336)}
QUANTIZATION = {
    "fp8": dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]),
    "gptq": dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=True, checkpoint_format="gptq"),
}


def fp8_tensors(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    codes = torch.randint(0, 0x7F, (outputs, inputs), dtype=torch.uint8)
    return {
        "weight": codes.view(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(-(-outputs // 128), -(-inputs // 128)) / 1000,
    }


def gptq_tensors(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)

    groups = inputs // GROUP
    return {
        "qweight": words(inputs // 8, outputs),
        "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": (torch.rand(groups, outputs) / 100).half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def bf16_tensors(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randint(-9999, 9999, (outputs, inputs), dtype=torch.int16).view(torch.bfloat16)}


TENSORS = {"fp8": fp8_tensors, "gptq": gptq_tensors, "ranks": bf16_tensors}


def save(folder: Path, kind: str, gigabytes: float) -> None:
    """Saves a folder of about this size. All layers have the same numbers."""
    layer = {
        f"{module}.{name}": value for module, shape in MATRICES.items() for name, value in TENSORS[kind](*shape).items()
    }
    layer |= {f"{norm}.weight": torch.ones(4096) for norm in ("input_layernorm", "post_attention_layernorm")}
    size = sum(value.nbytes for value in layer.values())
    layers = max(1, round(gigabytes * 1e9 / size))
    tensors = {f"model.layers.{i}.{name}": value.clone() for i in range(layers) for name, value in layer.items()}
    tensors |= {"model.embed_tokens.weight": torch.zeros(1024, 4096), "model.norm.weight": torch.ones(4096)}
    save_file(tensors, folder / "model.safetensors")
    more = {"quantization_config": QUANTIZATION[kind]} if kind in QUANTIZATION else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers} | more))


def load_matrices(weights: Any, weight_format: Any) -> None:
    """Loads every matrix of the layers, one after the other, and drops it."""
    loader = TorchWeightLoader(weights, weight_format, torch.bfloat16, torch.device("cpu"))
    for name in weights.names():
        if "_proj.weight" in name:
            loader.load_matrix(name)


def measure(what: str, size: int, load: Callable[[], None]) -> None:
    """Prints the rates of a load that reads `size` bytes."""
    totals, readings, read = [], [], ParallelReader.read

    def timed(self: ParallelReader, *arguments: Any) -> None:
        begun = time.perf_counter()
        read(self, *arguments)
        readings[-1] += time.perf_counter() - begun

    ParallelReader.read = timed  # type: ignore[method-assign]
    for _ in range(REPEATS + 1):  # the first one brings the file to the page cache
        readings.append(0.0)
        begun = time.perf_counter()
        load()
        totals.append(time.perf_counter() - begun)
    ParallelReader.read = read  # type: ignore[method-assign]
    total, reading = statistics.median(totals[1:]), statistics.median(readings[1:])
    alone = f"{size / reading / 1e9:5.2f}" if reading else "    -"
    print(f"{what:24s} {size / 1e9:5.2f} GB   load {size / total / 1e9:5.2f} GB/s   reading {alone} GB/s", flush=True)


def kinds_and_loads(kind: str, folder: Path) -> Iterable[tuple[str, int, Callable[[], None]]]:
    size = (folder / "model.safetensors").stat().st_size
    if kind != "ranks":
        yield kind, size, lambda: load_matrices(open_checkpoint(folder), "as-stored")
        return
    for index in range(2):
        rank = Rank(index, 2)
        yield (
            f"bf16, rank {index} of 2",
            size // 2,
            lambda rank=rank: load_matrices(open_rank_checkpoint(folder, rank), "bf16"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kinds", nargs="*", choices=TENSORS, default=list(TENSORS))
    parser.add_argument("--gguf", type=Path, help="also measures this file")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made; default: that for temporary files")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            save(Path(name), kind, arguments.gigabytes)
            for what, size, load in kinds_and_loads(kind, Path(name)):
                measure(what, size, load)
    if arguments.gguf:
        path = arguments.gguf
        measure(path.name, path.stat().st_size, lambda: load_matrices(open_checkpoint(path), "as-stored"))


if __name__ == "__main__":
    main()
