"""How byte-level BPE divides a text into words, by the name that a GGUF file gives (`tokenizer.ggml.pre`).

The names are those of llama.cpp (src/llama-vocab.cpp). The rules are those of the models' own tokenizer.json, in
Oniguruma's syntax. llama.cpp approximates some of them: outside of ASCII it does not tell upper from lower case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tokenizers import Regex, pre_tokenizers

from plait.runtime.errors import UnsupportedModel

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
