"""Compares token ids with those of llama.cpp's test vocabularies.

    python benchmarks/llama_cpp_vocabularies.py FOLDER

FOLDER is `models/` of a llama.cpp checkout or source archive: `ggml-vocab-NAME.gguf` has a tokenizer and no weights,
`.gguf.inp` has texts, and `.gguf.out` has the ids that the model's own tokenizer gave for them. Prints a line for each
vocabulary; the exit code is 1 if ids differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from plait.runtime.errors import ModelError
from plait.runtime.tokenizer.tokenizer import load_tokenizer

BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"


def main(folder: Path) -> int:
    differing = 0
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        texts = path.with_name(path.name + ".inp")
        if not texts.exists():
            continue
        try:
            tokenizer = load_tokenizer(path)
        except ModelError as error:
            print(f"{path.name}: {error!s:.60}")
            continue
        cases = texts.read_text(encoding="utf-8").split(BETWEEN_TEXTS)[:-1]
        lines = path.with_name(path.name + ".out").read_text().splitlines()
        expected = [[int(token) for token in line.split()] for line in lines[: len(cases)]]
        ids = [tokenizer.encode([(text, False)], at_start=True) for text in cases]
        wrong = [text for text, ours, theirs in zip(cases, ids, expected, strict=True) if ours != theirs]
        differing += len(wrong)
        print(f"{path.name}: {len(cases) - len(wrong)} of {len(cases)} texts equal", *map(repr, wrong), sep="\n  ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
