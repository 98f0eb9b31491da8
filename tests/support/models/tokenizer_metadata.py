"""GGUF metadata of small tokenizers: byte-level BPE and SentencePiece."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers


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


_CORPUS = (
    "The sky is red, isn't it? 12345 12 345 1.25 +1+1 $5 I'LL we've can't\n\n  def f(x):\n    return x**2  # ok\r\n"
    " naïve café Äpfel ЖЖжж слово Ωω हिन्दी ไทย عربي 漢字かなカナ 한국어 ½ ½ ² ٣٤٥ 🙂🙂 == `a`b` /*/"
    " \t\t\u3000 ABCabc AbcDef iPhone\n"
)


@cache
def _trained_tokens() -> tuple[list[str], list[str]]:
    """Byte-level tokens, and merges that join what pre-tokenizers divide: spaces, digits, letters, punctuation."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(tokenizers.Regex(r"(?m).{1,6}"), "isolated")  # m: a dot matches a newline too
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_letters])
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, min_frequency=1, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([_CORPUS[i:] for i in range(6)], trainer)
    description = json.loads(tokenizer.to_str())["model"]
    return sorted(description["vocab"], key=description["vocab"].get), [" ".join(m) for m in description["merges"]]


def trained_metadata(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary whose ids show where a text was divided, with ChatML's control tokens."""
    tokens, merges = _trained_tokens()
    control = ["<|text_end|>", "<|im_start|>", "<|im_end|>"]
    key = "tokenizer.ggml."
    return {
        "general.architecture": "llama",
        key + "model": "gpt2",
        key + "pre": pre,
        key + "tokens": [*tokens, *control],
        key + "token_type": np.array([1] * len(tokens) + [3] * len(control), np.int32),
        key + "merges": list(merges),
        key + "bos_token_id": len(tokens),
        key + "eos_token_id": len(tokens),
    }
