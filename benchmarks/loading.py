"""Measures reading weights from a file in the page cache: by plait's threads, by safetensors, and by a plain read.

    python benchmarks/loading.py [--gigabytes 3] [--folder FOLDER] [--threads 2]

Makes a random checkpoint in the folder, which is deleted at the end. "staged" is the path to a GPU, with the copy from
the staging buffers to host memory in the place of the GPU's. All ways but the first two fill the same memory, which is
touched before: the page faults of new memory, which a GPU's has not, would hide the rest. Prints GB/s (10^9 bytes), the
median of five, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from plait.runtime.model_files.safetensors_bytes import SafetensorsBytes
from plait.runtime.weights.parallel_read import CHUNK_BYTES, ParallelReader

MATRIX = (8192, 4096)  # 64 MiB in bf16
REPEATS = 5


def plain_read(path: Path) -> None:
    """One thread, into one buffer that stays in the processor's cache as far as it fits."""
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def threaded(path: Path, places: dict[str, torch.Tensor], threads: int, is_staged: bool) -> Callable[[], None]:
    """Reads every tensor to its place, one after the other, as a checkpoint does."""
    reader, stored = ParallelReader(torch.device("cpu"), threads), SafetensorsBytes(path)
    if is_staged:
        reader.add_staging(2 * threads, is_pinned=False)

    def read() -> None:
        for name, place in places.items():
            reader.read(path, stored.offset(name), place)

    return read


def copied(path: Path, places: dict[str, torch.Tensor]) -> None:
    """Copies what safetensors maps."""
    for name, value in load_file(path).items():
        places[name].copy_(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="default: that for temporary files")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path, count = Path(folder) / "model.safetensors", max(1, int(arguments.gigabytes * 1e9 / (2 << 25)))
        names = [f"model.layers.{i}.weight" for i in range(count)]
        places = {name: torch.randint(-9999, 9999, MATRIX, dtype=torch.int16).view(torch.bfloat16) for name in names}
        save_file(places, path)
        size = path.stat().st_size
        ways: dict[str, Callable[[], object]] = {
            "plain read, one thread": lambda: plain_read(path),
            "safetensors load_file, mapped": lambda: load_file(path),
            "safetensors load_file, then copied": lambda: copied(path, places),
            "plait, direct": threaded(path, places, arguments.threads, False),
            "plait, staged": threaded(path, places, arguments.threads, True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, read in ways.items():
                begun = time.perf_counter()
                read()
                seconds[name].append(time.perf_counter() - begun)
        for name, taken in seconds.items():
            rate = size / statistics.median(taken) / 1e9
            print(f"{name:36} {rate:7.2f} GB/s   16 GB in {16 / rate:5.2f} s", flush=True)


if __name__ == "__main__":
    main()
