"""Small tokenizers of several families, trained by the `tokenizers` library and saved as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizer_samples import DIGITS_THEN_BYTES, SAMPLES
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [*SAMPLES, "the cat sat on the mat and the dog ate the cat food 123 456"] * 3
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("</s>", special=True),
    AddedToken("<end>", special=True, rstrip=True),
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("<tool>2", special=False, normalized=False),
]


def train_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """Trains a small tokenizer of a family, with added tokens inside and outside of the vocabulary."""
    is_byte_level = kind == "byte-level"
    fallback: dict[str, Any] = {} if is_byte_level else {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    tokenizer = tokenizers.Tokenizer(models.BPE(**fallback))
    if is_byte_level:
        tokenizer.pre_tokenizer, tokenizer.decoder = DIGITS_THEN_BYTES, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<s>", "</s>"]
    else:
        if kind == "prepend":
            steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            tokenizer.normalizer = normalizers.Sequence(steps)
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet, special = [], ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if not is_byte_level:
        # The trainer marks byte tokens as special; model files do not.
        source = json.loads(tokenizer.to_str())
        source["added_tokens"] = [t for t in source["added_tokens"] if not t["content"].startswith("<0x")]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(source))
    tokenizer.add_special_tokens(ADDED[:4])
    tokenizer.add_tokens(ADDED[4:])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save_folder(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}} | config)
    )
    return folder
