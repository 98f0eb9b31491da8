"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from plait.constrained.tokens.tokenizer_file import is_panic
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
from plait.runtime.tokenizer.gguf_pre_tokenizers import SplitRule, find_split_rule
from plait.runtime.tokenizer.sentencepiece_merges import NORMAL, sentencepiece_merges

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = NORMAL, 2, 3, 4, 5
_KEY = "tokenizer.ggml."
# Tokens that end a turn. A file without eot_token_id may name only the end of a text.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


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
    rule = None if sentencepiece else find_split_rule(_name(metadata, "pre", "default"))
    adds_space = sentencepiece and _flag(metadata, "add_space_prefix", True)
    bos = _special_id(metadata, "bos_token_id", len(tokens), 1 if sentencepiece else None)
    eos_ids = _eos_ids(metadata, tokens, types, 2 if sentencepiece else None)
    control_ids = {i for i, token_type in enumerate(types) if token_type in (_UNKNOWN, _CONTROL, _UNUSED)}
    control_ids |= set(eos_ids) if bos is None else {bos, *eos_ids}
    plain_text_ids = set() if adds_space else _plain_text_user_defined_ids(tokens, types, control_ids)
    to_bytes = sentencepiece_token_bytes if sentencepiece else byte_level_token_bytes
    return TokenizerDefinition(
        backends=Backends(lambda: _build_backends(metadata, tokens, types, rule, plain_text_ids)),
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
        add_bos=_flag(metadata, "add_bos_token", rule is None or rule.add_bos),
        chat_template=_template(metadata, tokens, bos, eos_ids[0]),
        suffix_ids=eos_ids[:1] if _flag(metadata, "add_eos_token", False) else (),
    )


def _plain_text_user_defined_ids(tokens: Sequence[str], types: Sequence[int], control_ids: set[int]) -> set[int]:
    """Returns the user-defined tokens that are matched in any text, longest first, before letters are merged.

    Not for SentencePiece with a space before a text: `tokenizers` would insert one after each of these tokens.
    """
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


def _eos_ids(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], default: int | None
) -> tuple[int, ...]:
    """Returns the tokens that end a text, a turn or a message, in this order."""
    ends = [_special_id(metadata, "eos_token_id", len(tokens), default)]
    ends += [_special_id(metadata, key, len(tokens)) for key in ("eot_token_id", "eom_token_id")]
    if ends[1] is None:
        named = (i for i, text in enumerate(tokens) if text in _TURN_ENDS)
        ends += [i for i in named if types[i] in (_CONTROL, _USER_DEFINED)]  # user-defined in files of Phi-3
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
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    rule: SplitRule | None,
    plain_text_ids: set[int],
) -> BackendPair:
    """`rule`: of byte-level BPE; None for SentencePiece. Raises CorruptModel."""
    try:
        if rule is None:
            pair = _sentencepiece(metadata, tokens, types, plain_text_ids)
        else:
            pair = _byte_level(metadata, tokens, types, rule, plain_text_ids)
    except CorruptModel:
        raise
    except BaseException as error:  # `tokenizers` raises plain Exception, or panics, for inconsistent lists
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CorruptModel("the tokenizer's lists contradict each other; download the file again") from error
    pair[0].add_tokens([tokenizers.AddedToken(tokens[i], normalized=False) for i in sorted(plain_text_ids)])
    return pair


def _byte_level(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    rule: SplitRule,
    plain_text_ids: set[int],
) -> BackendPair:
    # The vocabulary holds only what BPE may produce, so that text never becomes a control token.
    vocab = {text: i for i, text in enumerate(tokens) if types[i] == _NORMAL or i in plain_text_ids}
    merges = [merge for text in _strings(metadata, "merges") if (merge := _merge(text, vocab))]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = rule.pre_tokenizer()
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, backend


def _merge(text: str, vocab: Mapping[str, int]) -> tuple[str, str] | None:
    """Returns the two halves of "left right", or None if one of the three tokens is not in `vocab`."""
    split = text.find(" ", 1)
    left, right = text[:split], text[split + 1 :]
    if split < 0 or not right:
        raise CorruptModel(f"the merge {text!r:.40} is not two tokens")
    return (left, right) if left + right in vocab and left in vocab and right in vocab else None


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
    return continuation, initial if _flag(metadata, "add_space_prefix", True) else continuation
