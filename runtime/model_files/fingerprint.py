"""A fingerprint of a model's files, by which replicas of one model know that they have the same one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SUFFIXES = (".safetensors", ".json", ".jinja")  # of the files of a folder that a runtime reads
HEAD_BYTES = 16 << 20  # read in full: the header of a .gguf file, with its tokenizer, or a tokenizer.json
SAMPLES, SAMPLE_BYTES = 512, 4096  # of the rest


def model_fingerprint(path: Path) -> str:
    """Returns 32 hexadecimal digits of a .gguf file or a folder, which do not depend on where it is, nor on its times.

    Files are told apart by name, size, their first 16 MiB, and 4 KiB at 512 places of the rest. Raises OSError.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for place in files:
        with place.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            name = str(place.relative_to(path)) if place != path else ""
            digest.update(f"\0{name}\0{size}\0".encode(errors="surrogateescape"))
            digest.update(file.read(HEAD_BYTES))
            length = max(0, size - SAMPLE_BYTES - HEAD_BYTES)
            for start in sorted({HEAD_BYTES + length * index // (SAMPLES - 1) for index in range(SAMPLES)}):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()
