"""Damaged model files: mutated headers in a process of limited memory, and servers that are started on them."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from faults.figures import Figure, Scale, at_most, none_of
from faults.served import serve
from tiny_llama_gguf import write_small_model

from plait.runtime.errors import ModelError, PlaitError
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.tokenizer.tokenizer import load_tokenizer

HEADER_BYTES = 1200  # of the model: the counts, the first keys, and the first lengths of arrays
MEMORY_BYTES = 4 << 30
CHILD = (
    "import sys; sys.path[:0] = {path!r}; from faults.groups.model_files import read_mutants; read_mutants({arguments})"
)


def inflict(scale: Scale) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        path = write_small_model(Path(name) / "small.gguf")
        headers = write_headers(Path(name) / "headers.gguf")
        yield from mutants("headers", headers, scale.count(5000, 200), False)
        yield from mutants("files with tokenizers", path, scale.count(100, 5), True)
        yield from damaged_servers(path, scale)


def write_headers(path: Path) -> Path:
    """A file of some kilobytes with keys of every kind and three tensors, all of it header but the last kilobyte."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("x.words", ["one", "two", "three"])
    writer.add_array("x.numbers", [1, 2, 3])
    writer.add_bool("x.flag", True)
    for name in ("one", "two", "three"):
        writer.add_tensor(name, np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mutate(contents: bytearray, draw: random.Random) -> None:
    """Changes bytes of the header or of the table of tensors, or truncates the file."""
    kind = draw.randrange(6)
    size = min(HEADER_BYTES, len(contents))
    place = draw.randrange(size)
    if kind == 0:
        del contents[draw.randrange(len(contents)) :]
    elif kind == 1:
        contents[place : place + 8] = draw.choice([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f", b"\x00" * 7 + b"\x80"])
    elif kind == 2:
        del contents[place : place + draw.randint(1, 16)]
    elif kind == 3:
        contents[place:place] = draw.randbytes(draw.randint(1, 16))
    else:
        for _ in range(draw.randint(1, 8)):
            contents[draw.randrange(size)] = draw.randrange(256)


def read_mutants(path: str, seed: int, count: int, is_loaded: bool) -> None:
    """The child: reads mutants, with their tokenizers if `is_loaded`. Prints the outcomes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    original, draw, outcomes, slowest = Path(path).read_bytes(), random.Random(seed), Counter[str](), 0.0
    mutant = Path(path).with_name("mutant.gguf")
    for _ in range(count):
        contents = bytearray(original)
        mutate(contents, draw)
        mutant.write_bytes(contents)
        start = time.perf_counter()
        try:
            file = open_gguf(mutant)
            for tensor in file.tensors:
                file.tensor_bytes(tensor)
            if is_loaded:
                load_tokenizer(mutant)
            outcomes["read"] += 1
        except (ModelError, PlaitError):
            outcomes["refused"] += 1
        slowest = max(slowest, time.perf_counter() - start)
    print(outcomes["read"], outcomes["refused"], slowest)


def mutants(what: str, path: Path, count: int, is_loaded: bool) -> Iterator[Figure]:
    """Any other error than ours, a crash or too much memory ends the child."""
    code = CHILD.format(path=sys.path, arguments=f"{str(path)!r}, 1, {count}, {is_loaded}")
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=140, check=False)
    if child.returncode:
        failure = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        yield none_of(f"{count:,} mutated GGUF {what}", failure, count, "crashes")
        return
    _, num_refused, slowest = child.stdout.split()
    yield none_of(f"{count:,} mutated GGUF {what} ({num_refused} refused)", [], count, "crashes or other errors")
    yield at_most("the same: the slowest", float(slowest), 5, "s", is_timed=True)


def damaged_servers(path: Path, scale: Scale) -> Iterator[Figure]:
    """`plait serve` on damaged files: an error message and exit code 1."""
    original = path.read_bytes()
    damaged = {
        "empty": b"",
        "no GGUF": b"PK\x03\x04" + original[4:4096],
        "truncated in its header": original[:300],
        "truncated in its weights": original[:-1000],
        "a claimed length": original[:16] + b"\xff" * 8 + original[24:],
    }
    failures, slowest = [], 0.0
    for name, contents in list(damaged.items())[: scale.count(5, 2)]:
        path.write_bytes(contents)
        start = time.perf_counter()
        try:
            with serve(model=str(path)):
                failures.append(f"{name}: it started")
        except RuntimeError as error:
            failures += [f"{name}: a traceback"] if "Traceback" in str(error) else []
        slowest = max(slowest, time.perf_counter() - start)
    count = scale.count(5, 2)
    yield none_of("servers of damaged files: an error message", failures, count, "without")
    yield at_most("the same: the slowest", slowest, 15, "s", is_timed=True)
