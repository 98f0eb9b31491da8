"""Reads the bytes of each token and the end tokens from a tokenizer of the `tokenizers` package.

The byte-level alphabet is that of https://github.com/openai/gpt-2/blob/master/src/encoder.py.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Encode: TypeAlias = Callable[[str], Sequence[int]]
TokenizerParts: TypeAlias = tuple[tuple[bytes, ...], tuple[int, ...], Encode, Mapping[int, str]]
"""Token bytes, end tokens, encode, and the texts of control tokens: the arguments of Vocabulary."""
_CONFIGS = ("generation_config.json", "config.json", "tokenizer_config.json")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class FastTokenizer(Protocol):
    """A fast tokenizer of transformers."""

    backend_tokenizer: Any


def read_tokenizer(
    source: str | Path | Tokenizer | FastTokenizer, eos_ids: Iterable[int] | None, size: int | None
) -> TokenizerParts:
    """Returns the arguments of Vocabulary. Raises ValueError for unknown formats."""
    from tokenizers import Tokenizer

    folder: Path | None = None
    if isinstance(source, str | Path):
        path = _file_of(Path(source))
        if path.suffix == ".gguf":
            return _read_gguf(path, eos_ids, size)
        folder, tokenizer = path.parent, _read(path)
    else:
        inner = getattr(source, "backend_tokenizer", source)  # of a tokenizer of transformers
        if not isinstance(inner, Tokenizer):
            raise TypeError(f"a tokenizer is a path, or a fast tokenizer, not {type(source).__name__}")
        if eos_ids is None and isinstance(eos_id := getattr(source, "eos_token_id", None), int):
            eos_ids = (eos_id,)
        tokenizer = Tokenizer.from_str(inner.to_str())  # a copy: its settings are about to change
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # text that spells a control token stays text
    ends = tuple(eos_ids) if eos_ids is not None else _find_eos_ids(folder, tokenizer)
    if not ends:
        raise ValueError("no file beside the tokenizer names its end tokens: pass eos_ids")

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    names = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
    return _token_bytes(tokenizer, size), ends, encode, names


def _file_of(path: Path) -> Path:
    """Returns the file of a tokenizer at a path: of a folder its tokenizer.json, or its only .gguf file."""
    if not path.is_dir() or (path / "tokenizer.json").exists():
        return path / "tokenizer.json" if path.is_dir() else path
    models = sorted(path.glob("*.gguf"))
    if len(models) != 1:
        raise FileNotFoundError(f"{path} has no tokenizer.json, and {len(models)} .gguf files instead of one")
    return models[0]


def _read_gguf(path: Path, eos_ids: Iterable[int] | None, size: int | None) -> TokenizerParts:
    """The runtime reads model files. It is known by its name alone: constraints import nothing of it before that."""
    reader = importlib.import_module("plait.runtime.tokenizer.tokenizer")
    vocabulary = reader.load_tokenizer(path, vocab_size=size).vocabulary
    ends = vocabulary.eos_ids if eos_ids is None else tuple(eos_ids)
    return vocabulary.token_bytes, ends, vocabulary.encode, vocabulary.control_texts


def _read(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    text = path.read_bytes()
    try:
        return Tokenizer.from_buffer(text)
    except BaseException as error:  # the package raises nothing narrower than Exception, and it panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None


def is_panic(error: BaseException) -> bool:
    """Returns whether `error` is a panic of a package written in Rust, which is no Exception and cannot be imported."""
    return type(error).__name__ == "PanicException"


def _token_bytes(tokenizer: Tokenizer, size: int | None) -> tuple[bytes, ...]:
    spell = _token_decoder(json.loads(tokenizer.to_str()))
    added = tokenizer.get_added_tokens_decoder()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    width = max(ids.values(), default=-1) + 1
    if size is not None:
        if size < width:
            raise ValueError(f"the tokenizer has {width} tokens, more than the given size of {size}")
        width = size
    token_bytes = [b""] * width
    for token, token_id in ids.items():
        if token_id not in added:
            token_bytes[token_id] = spell(token)
    return tuple(token_bytes)


def _token_decoder(description: dict[str, Any]) -> Callable[[str], bytes]:
    """Returns the function from a token to its bytes, chosen by the tokenizer's decoder and pre-tokenizer."""
    parts = list(_parts(description.get("decoder"))) + list(_parts(description.get("pre_tokenizer")))
    types = {part.get("type") for part in parts}
    if "ByteLevel" in types:
        return decode_byte_level_token
    if types & {"ByteFallback", "Metaspace"} or any("▁" in json.dumps(p, ensure_ascii=False) for p in parts):
        return decode_sentencepiece_token
    raise ValueError("the tokenizer is neither byte-level nor SentencePiece; build the Vocabulary from its bytes")


def _parts(component: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if component:
        yield component
        for key in ("decoders", "pretokenizers"):
            for inner in component.get(key, ()):
                yield from _parts(inner)


@cache
def byte_alphabet() -> dict[str, int]:
    """Returns {character: byte} of byte-level BPE: printable Latin-1 characters stand for themselves.

    >>> byte_alphabet()["Ġ"], byte_alphabet()["a"]
    (32, 97)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def decode_byte_level_token(token: str) -> bytes:
    """Returns the bytes of a byte-level token; a token with other characters has its UTF-8 bytes.

    >>> decode_byte_level_token("ĠcafÃ©").decode()
    ' café'
    """
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def decode_sentencepiece_token(token: str) -> bytes:
    """Returns the bytes of a SentencePiece token: "▁" is a space, `<0xNN>` a byte.

    >>> decode_sentencepiece_token("▁a"), decode_sentencepiece_token("<0x0A>")
    (b' a', b'\\n')
    """
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _find_eos_ids(folder: Path | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids under eos_token_id, or that of eos_token, from the first config file that names any."""
    for name in _CONFIGS if folder is not None else ():
        path = folder / name if folder is not None else Path(name)
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        eos = config.get("eos_token_id")
        if eos is None and (token := config.get("eos_token")) is not None:
            eos = tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()
