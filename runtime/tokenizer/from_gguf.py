"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from plait.constrained.tokenizer_file import is_panic
from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import (
    SENTENCEPIECE_SPACE,
    AddedToken,
    BackendPair,
    Backends,
    TokenizerDefinition,
    byte_level_token_bytes,
    is_text_token,
    sentencepiece_token_bytes,
)
from plait.runtime.tokenizer.sentencepiece_merges import NORMAL, sentencepiece_merges

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = NORMAL, 2, 3, 4, 5
_KEY = "tokenizer.ggml."

# Values of tokenizer.ggml.pre: how text is split into words before BPE.
_GPT2 = ("gpt-2", "gpt2", "default")
_SINGLE_DIGITS = ("smollm", "starcoder")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def definition_from_gguf(metadata: Mapping[str, Any], vocab_size: int | None = None) -> TokenizerDefinition:
    """Builds the tokenizer. `vocab_size` is the model's number of logits; by default the metadata tells it.

    Raises UnsupportedModel for another kind of tokenizer, CorruptModel for inconsistent lists.
    """
    kind = _name(metadata, "model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"the tokenizer {kind!r:.40} is not supported; supported are 'gpt2' and 'llama'")
    tokens = _strings(metadata, "tokens")
    types = _numbers(metadata, "token_type", len(tokens), _NORMAL)
    sentencepiece = kind == "llama"
    pre = _name(metadata, "pre", "default")
    bos = _special_id(metadata, "bos_token_id", len(tokens), 1 if sentencepiece else None)
    eos_ids = _eos_ids(metadata, len(tokens), 2 if sentencepiece else None)
    control_ids = {i for i, token_type in enumerate(types) if token_type in (_UNKNOWN, _CONTROL, _UNUSED)} | set(
        eos_ids
    )
    control_ids |= set() if bos is None else {bos}
    plain_text_ids = _plain_text_user_defined_ids(metadata, tokens, types, control_ids) if sentencepiece else set()
    if not sentencepiece:
        _pre_tokenizer(pre, add_space=False)  # refuses an unknown one now
    adds_space = sentencepiece and _flag(metadata, "add_space_prefix", True)
    to_bytes = sentencepiece_token_bytes if sentencepiece else byte_level_token_bytes
    return TokenizerDefinition(
        backends=Backends(lambda: _build_backends(metadata, tokens, types, plain_text_ids if sentencepiece else None)),
        prefix_after_control=adds_space,
        added_tokens={
            text: AddedToken(i)
            for i, text in enumerate(tokens)
            if text and i not in plain_text_ids and (types[i] in (_CONTROL, _USER_DEFINED) or i == bos or i in eos_ids)
        },
        control_ids=frozenset(control_ids),
        token_bytes=_all_bytes(
            tokens, types, control_ids, to_bytes, _checked_vocab_size(metadata, vocab_size, len(tokens))
        ),
        eos_ids=eos_ids,
        bos_id=bos,
        add_bos=_flag(metadata, "add_bos_token", sentencepiece or pre in _LLAMA3),
        chat_template=_template(metadata, tokens, bos, eos_ids[0]),
        suffix_ids=eos_ids[:1] if _flag(metadata, "add_eos_token", False) else (),
    )


def _plain_text_user_defined_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], control_ids: set[int]
) -> set[int]:
    """Returns the user-defined tokens that SentencePiece matches in any text, longest first, before it merges letters.

    Returns none if an initial text begins with a space, since `tokenizers` would insert one after each of these tokens.
    """
    if _flag(metadata, "add_space_prefix", True):
        return set()
    user_defined = (i for i, token_type in enumerate(types) if token_type == _USER_DEFINED)
    return {i for i in user_defined if i not in control_ids and is_text_token(tokens[i])}


def _name(metadata: Mapping[str, Any], key: str, default: str = "") -> str:
    value = metadata.get(_KEY + key, default)
    if not isinstance(value, str):
        raise CorruptModel(f"{_KEY}{key} is not a text")
    return value


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(_KEY + key, default)
    if type(value) is not bool:
        raise CorruptModel(f"{_KEY}{key} is neither true nor false")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(_KEY + key)
    if not isinstance(value, list) or not value:
        raise CorruptModel(f"the file has no list {_KEY}{key}; without it there is no tokenizer")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, count: int, default: float) -> list[Any]:
    value = metadata.get(_KEY + key)
    if value is None:
        return [default] * count
    if not hasattr(value, "tolist") or len(value) != count:
        raise CorruptModel(f"{_KEY}{key} does not have one number for each of the {count} tokens")
    numbers: list[Any] = value.tolist()
    return numbers


def _special_id(metadata: Mapping[str, Any], key: str, count: int, default: int | None = None) -> int | None:
    value = metadata.get(_KEY + key, default)
    if value is None:
        return None
    if type(value) is not int:
        raise CorruptModel(f"{_KEY}{key} is not a whole number")
    if value == 0xFFFFFFFF:  # -1 as uint32: no such token
        return None
    if not 0 <= value < count:
        raise CorruptModel(f"{_KEY}{key} is {value}, beyond the {count} tokens")
    return value


def _eos_ids(metadata: Mapping[str, Any], count: int, default: int | None) -> tuple[int, ...]:
    """Returns the tokens that end a text, a turn or a message, in this order."""
    ends = [_special_id(metadata, "eos_token_id", count, default)]
    ends += [_special_id(metadata, key, count) for key in ("eot_token_id", "eom_token_id")]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    if not eos_ids:
        raise CorruptModel("the file names no end-of-sequence token (tokenizer.ggml.eos_token_id)")
    return eos_ids


def _checked_vocab_size(metadata: Mapping[str, Any], vocab_size: int | None, count: int) -> int:
    if vocab_size is None:
        stored = metadata.get(f"{metadata.get('general.architecture')}.vocab_size", count)
        vocab_size = stored if type(stored) is int else count
    if not count <= vocab_size <= 2**24:
        raise CorruptModel(f"the tokenizer has {count} tokens, but the model's embedding has {vocab_size} rows")
    return vocab_size


def _all_bytes(
    tokens: Sequence[str], types: Sequence[int], control_ids: Iterable[int], to_bytes: Any, vocab_size: int
) -> tuple[bytes, ...]:
    token_bytes = [text.encode() if types[i] == _USER_DEFINED else to_bytes(text) for i, text in enumerate(tokens)]
    token_bytes += [b""] * (vocab_size - len(tokens))
    for i in control_ids:
        token_bytes[i] = b""
    return tuple(token_bytes)


def _template(metadata: Mapping[str, Any], tokens: Sequence[str], bos: int | None, eos: int) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CorruptModel("tokenizer.chat_template is not a text")
    return ChatTemplate(source, "" if bos is None else tokens[bos], tokens[eos])


def _build_backends(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], plain_text_ids: set[int] | None
) -> BackendPair:
    """`plain_text_ids`: of SentencePiece; None for byte-level BPE. Raises UnsupportedModel or CorruptModel."""
    try:
        if plain_text_ids is None:
            return _byte_level(metadata, tokens, types)
        return _sentencepiece(metadata, tokens, types, plain_text_ids)
    except (UnsupportedModel, CorruptModel):
        raise
    except BaseException as error:  # `tokenizers` raises plain Exception, or panics, for inconsistent lists
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CorruptModel("the tokenizer's lists contradict each other; download the file again") from error


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> BackendPair:
    pre = _name(metadata, "pre", "default")
    # The vocabulary holds only what BPE may produce, so that text never becomes a control token.
    vocab = {text: i for i, text in enumerate(tokens) if types[i] == _NORMAL}
    merges = [merge for text in _strings(metadata, "merges") if (merge := _merge(text, vocab))]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3))
    backend.pre_tokenizer = _pre_tokenizer(pre, _flag(metadata, "add_space_prefix", False))
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend, backend


def _merge(text: str, vocab: Mapping[str, int]) -> tuple[str, str] | None:
    """Returns the two halves of "left right", or None if one of the three tokens is not in `vocab`."""
    split = text.find(" ", 1)
    left, right = text[:split], text[split + 1 :]
    if split < 0 or not right:
        raise CorruptModel(f"the merge {text!r:.40} is not two tokens")
    return (left, right) if left + right in vocab and left in vocab and right in vocab else None


def _pre_tokenizer(pre: str, add_space: bool) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=True)
    if pre in _SINGLE_DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre not in _LLAMA3 + _QWEN2:
        known = ", ".join(_GPT2 + _SINGLE_DIGITS + _LLAMA3 + _QWEN2)
        raise UnsupportedModel(f"the pre-tokenizer {pre!r:.40} is not supported; supported are {known}")
    pattern = Regex(_WORD_PATTERN % ("{1,3}" if pre in _LLAMA3 else ""))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], plain_text_ids: set[int]
) -> BackendPair:
    scores = _numbers(metadata, "scores", len(tokens), 0.0)
    unknown = _special_id(metadata, "unknown_token_id", len(tokens), 0)
    vocab = {text: i for i, text in enumerate(tokens) if types[i] not in (_CONTROL, _USER_DEFINED, _UNUSED)}
    vocab |= {tokens[i]: i for i in plain_text_ids}
    unknown_text = tokens[unknown] if unknown is not None and tokens[unknown] in vocab else None
    merges = sentencepiece_merges(tokens, types, scores, vocab)
    model = models.BPE(vocab, merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=True)
    continuation, initial = tokenizers.Tokenizer(model), tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SENTENCEPIECE_SPACE)
    continuation.normalizer = spaces
    initial.normalizer = normalizers.Sequence([normalizers.Prepend(SENTENCEPIECE_SPACE), spaces])
    continuation.add_tokens([tokenizers.AddedToken(tokens[i], normalized=False) for i in sorted(plain_text_ids)])
    return continuation, initial if _flag(metadata, "add_space_prefix", True) else continuation
