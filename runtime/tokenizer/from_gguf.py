"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

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
from plait.runtime.tokenizer.sentencepiece_merges import NORMAL, sentencepiece_merges

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = NORMAL, 2, 3, 4, 5
V = TypeVar("V", str, bool)

_KEY = "tokenizer.ggml."
# Tokens that end a turn. A file without eot_token_id may name only the end of a text.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def definition_from_gguf(metadata: Mapping[str, Any], vocab_size: int | None = None) -> TokenizerDefinition:
    """Builds the tokenizer. `vocab_size` is the model's number of logits; by default the metadata tells it.

    Raises UnsupportedModel for another kind of tokenizer, CorruptModel for inconsistent lists.
    """
    kind = _value(metadata, "model", "")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"the tokenizer {kind!r:.40} is not supported; supported are 'gpt2' and 'llama'")
    tokens = _strings(metadata, "tokens")
    types = _numbers(metadata, "token_type", len(tokens), _NORMAL)
    sentencepiece = kind == "llama"
    rule = None if sentencepiece else find_split_rule(_value(metadata, "pre", "default"))
    adds_space = sentencepiece and _value(metadata, "add_space_prefix", True)
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
        add_bos=_value(metadata, "add_bos_token", rule is None or rule.add_bos),
        chat_template=_template(metadata, tokens, bos, eos_ids[0]),
        suffix_ids=eos_ids[:1] if _value(metadata, "add_eos_token", False) else (),
    )


def _plain_text_user_defined_ids(tokens: Sequence[str], types: Sequence[int], control_ids: set[int]) -> set[int]:
    """Returns the user-defined tokens that are matched in any text, longest first, before letters are merged.

    Not for SentencePiece with a space before a text: `tokenizers` would insert one after each of these tokens.
    """
    user_defined = (i for i, token_type in enumerate(types) if token_type == _USER_DEFINED)
    return {i for i in user_defined if i not in control_ids and is_text_token(tokens[i])}


def _value(metadata: Mapping[str, Any], key: str, default: V) -> V:
    """Returns the value of a key, of the default's type."""
    value = metadata.get(_KEY + key, default)
    if type(value) is not type(default):
        raise CorruptModel(f"{_KEY}{key} is {'not a text' if isinstance(default, str) else 'neither true nor false'}")
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
    return continuation, initial if _value(metadata, "add_space_prefix", True) else continuation


# -- gguf pre tokenizers --------------------------------------------------------------------------
# How byte-level BPE divides a text into words, by the name that a GGUF file gives (`tokenizer.ggml.pre`).
#
# The names are those of llama.cpp (src/llama-vocab.cpp). The rules are those of the models' own tokenizer.json, in
# Oniguruma's syntax. llama.cpp approximates some of them: outside of ASCII it does not tell upper from lower case.

Split = str | Callable[[], pre_tokenizers.PreTokenizer]


@dataclass(frozen=True)
class SplitRule:
    """How a text becomes words, inside which BPE merges.

    splits: applied in order. Each divides the pieces that the one before it left; each match of a pattern is a piece.
    nfc: the text is normalized to NFC first.
    ignore_merges: a word of the vocabulary is one token even if no merges lead to it.
    add_bos: a text begins with the BOS token, unless the file has `add_bos_token`.
    """

    splits: tuple[Split, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Returns the splits, followed by the conversion of bytes to GPT-2's letters."""
        steps = [
            pre_tokenizers.Split(Regex(split), "isolated") if isinstance(split, str) else split()
            for split in self.splits
        ]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def find_split_rule(name: str) -> SplitRule:
    """Returns the rule of that name. Raises UnsupportedModel for an unknown one.

    >>> find_split_rule("tekken").ignore_merges
    True
    """
    for names, rule in _RULES.items():
        if name in names.split():
            return rule
    raise UnsupportedModel(
        f"the pre-tokenizer {name!r:.40} (tokenizer.ggml.pre) is not supported; supported are "
        f"{', '.join(sorted(' '.join(_RULES).split()))}. The model's safetensors folder, which has a tokenizer.json, "
        "needs no such name"
    )


_DIGIT = partial(pre_tokenizers.Digits, individual_digits=True)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_OTHERS}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_OTHERS}"


def _cased_words(suffix: str, number: str) -> str:
    """Returns the pattern whose words are upper-case letters and then lower-case ones, with `suffix`."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# Letters of the scripts with upper and lower case, as DeepSeek's files list them: ranges of code points.
_DEEPSEEK_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""
_DEEPSEEK_CLASS = "".join(
    "-".join(f"\\x{{{end}}}" for end in letters.split("-")) for letters in _DEEPSEEK_LETTERS.split()
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_SPACES_AT_END = r"(?<!\s)\s+$"  # DeepSeek's \s+$, which takes quadratic time
_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"

_RULES = {
    "gpt-2 gpt2": SplitRule((_GPT2,)),
    "mpt": SplitRule((_GPT2,), nfc=True),
    "smollm starcoder refact": SplitRule((_DIGIT, _GPT2)),
    "command-r": SplitRule((_DIGIT, _GPT2), nfc=True),
    "llama-bpe llama3 llama-v3": SplitRule((_CL100K,), ignore_merges=True, add_bos=True),
    "smaug-bpe": SplitRule((_CL100K,), ignore_merges=True),  # Llama 3's tokenizer without its BOS token
    "dbrx": SplitRule((_CL100K,)),
    "qwen2 deepseek-r1-qwen": SplitRule((_QWEN2,), nfc=True),
    "gpt-4o": SplitRule((_cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
    "tekken": SplitRule((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "deepseek-llm": SplitRule(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_CLASS}]+", _DEEPSEEK_PUNCTUATION, _SPACES_AT_END, _CJK, _DIGIT),
    ),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    # llama.cpp's own rule for files that name none; no model defines it.
    "default": SplitRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
