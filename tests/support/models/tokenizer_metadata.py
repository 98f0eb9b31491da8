"""GGUF metadata of small tokenizers: byte-level BPE and SentencePiece."""

from __future__ import annotations

from typing import Any

import numpy as np


def gguf_metadata() -> dict[str, Any]:
    """A small byte-level vocabulary with the names that Llama 3 and Qwen 2 files use."""
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = [*letters, "ab", "Ġab", "<|begin|>", "<|eot|>", "<|end|>", "<tool>"]
    types = [1] * (len(letters) + 2) + [3, 3, 3, 4]
    key = "tokenizer.ggml."
    return {
        "general.architecture": "llama",
        "llama.vocab_size": len(tokens) + 2,
        key + "model": "gpt2",
        key + "pre": "llama-bpe",
        key + "tokens": tokens,
        key + "token_type": np.array(types, np.int32),
        key + "merges": ["a b", "Ġ ab"],
        key + "bos_token_id": tokens.index("<|begin|>"),
        key + "eos_token_id": tokens.index("<|end|>"),
        key + "eot_token_id": tokens.index("<|eot|>"),
    }


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcd<>s/unk", "ab", "cd"]
SPM_TOKENS += ["▁a", "▁ab", "abcd", "bc", "▁▁", "▁▁▁▁", "dd", "<s", "[X]"]


def spm_metadata() -> dict[str, Any]:
    types = [2, 3, 3] + [6] * 256 + [1] * (len(SPM_TOKENS) - 260) + [4]
    scores = [0.0] * 259 + [-float(i % 7) - i / 100 for i in range(len(SPM_TOKENS) - 259)]
    key = "tokenizer.ggml."
    return {
        key + "model": "llama",
        key + "tokens": SPM_TOKENS,
        key + "token_type": np.array(types, np.int32),
        key + "scores": np.array(scores, np.float32),
    }
