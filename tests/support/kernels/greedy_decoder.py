"""The embedded model's packed decoder without a scheduler: decodes greedily and keeps the logits.

    python -P tests/support/kernels/greedy_decoder.py FILE      writes tokens and logits to FILE

Run as a program, it serves tests of kernels that are compiled for another CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from plait.kernels.cpu.decoder import instruction_set
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.config import engine_config
from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
from plait.runtime.executor.runner_factory import make_runner
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.model_files.locate import locate_model
from plait.runtime.tokenizer.tokenizer import load_tokenizer

PROMPT = """The moon is the Earth's only natural satellite. It goes around the Earth once in about 27 days, and the same
side of it always faces us. Its diameter is about a quarter of the Earth's, and its gravity a sixth. The first people on
it were Neil Armstrong and Buzz Aldrin, on 20 July 1969. The moon has no air and no weather, so their footprints are"""
NEW_TOKENS, PAGES = 24, 256


class GreedyDecoder:
    def __init__(self):
        path = locate_model()
        self.runner, _, _ = make_runner(engine_config(max_pages=PAGES, weights="as-stored"), path)
        assert isinstance(self.runner, PackedCpuRunner)
        tokenizer = load_tokenizer(path, vocab_size=self.runner.config.vocab_size)
        self.prompt = list(tokenizer.encode_plain(PROMPT))

    def logits(self, tokens, computed=0):
        """The logits [len(tokens) - computed, V]; the first `computed` tokens are in the cache."""
        seq = Sequence(CacheNamespace(), tokens)
        seq.pages.extend(np.arange(len(tokens), dtype=np.int32))
        batch = Batch(PAGES)
        batch.add(Request(None, seq, 0, computed), computed, len(tokens) - computed)
        return np.array(self.runner.logits(self.runner.forward(batch), {}))

    def decode_greedily(self):
        """The prompt with NEW_TOKENS tokens, one step each, and the logits of all but the last token."""
        tokens, logits = list(self.prompt), [self.logits(self.prompt)]
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits[-1][-1].argmax()))
            if len(tokens) < len(self.prompt) + NEW_TOKENS:
                logits.append(self.logits(tokens, len(tokens) - 1))
        return tokens, np.concatenate(logits)


if __name__ == "__main__":
    tokens, logits = GreedyDecoder().decode_greedily()
    Path(sys.argv[1]).write_bytes(np.array(tokens, np.int64).tobytes() + logits.astype(np.float32).tobytes())
    print(instruction_set())
