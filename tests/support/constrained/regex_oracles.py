"""210 patterns, and a comparison of the texts that their masks accept with re.fullmatch and interegular."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import interegular
import numpy as np

from plait.constrained import Grammar, Regex, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec

_PIECES = [bytes([byte]) for byte in range(256)]
_PIECES += [
    text.encode() for text in ("ab", "aa", "abc", "ba", "11", "1.", ".1", "yes", " please", "é", "日", "com", "a@")
]
IDS = {piece: 1 + at for at, piece in enumerate(_PIECES)}
LONGEST = max(map(len, _PIECES))
WORDS = Vocabulary((b"", *_PIECES), (0,), lambda text: [IDS[bytes([byte])] for byte in text.encode()])

REAL = [
    (r"[0-9]+(\.[0-9]+)?", "2.1 21 2. .1"),
    (r"[+-]?\d+", "-12 +7 12 --1"),
    (r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", "-0.5e10 00 1e 12"),
    (r"0x[0-9a-fA-F]{1,8}", "0xff 0x 0xg"),
    (r"\$?\d{1,3}(,\d{3})*(\.\d\d)?", "$1,234.50 1,23 12"),
    (r"\d{1,3}%", "100% % 1000%"),
    (r"\d{4}-\d{2}-\d{2}", "2024-01-31 2024-1-31"),
    (r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", "2024-12-31 2024-13-01"),
    (r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?", "23:59 24:00 01:02:03"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", "2024-01-01T00:00:00Z 2024-01-01T00:00:00"),
    (r"(0?[1-9]|1[0-2])/\d{1,2}/(\d{2}|\d{4})", "1/2/24 13/1/2024 12/31/1999"),
    (r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day", "Monday Funday"),
    (r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}", "a.b@c.de a@b"),
    (r"\w+@\w+\.com", "é1@b.com @b.com"),
    (r"(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)", "127.0.0.1 256.1.1.1"),
    (r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}", "1:2:3:4:5:6:7:8 1:2"),
    (r"([0-9A-F]{2}:){5}[0-9A-F]{2}", "00:1A:2B:3C:4D:5E 00:1A"),
    (r"https?://[^\s/$.?#][^\s]*", "http://a.b/c https:// ftp://a"),
    (r"(https?|ftp)://[\w.-]+(:\d+)?(/[\w./-]*)?(\?[\w=&]*)?(#\w*)?", "http://x.y:80/a?b=c#d http:/x"),
    (r"www\.[a-z]+\.(com|org|net)", "www.a.org www.a.de"),
    (r"yes|yes please", "yes yes\u0020please no"),
    (r"yes please|yes", "yes yes\u0020please yes\u0020p"),
    (r"a|ab|abc|abcd", "a ab abc abcd abcde"),
    (r"(a|ab)(c|bcd)(d*)", "abcd ac abcdd abd"),
    (r"(in|int|integer|interval)( not null)?", "int inte integer int\u0020not\u0020null"),
    (r"(true|false|null)", "true nul"),
    (r"(?i)true|false", "TRUE fALSE tru"),
    (r"(?i:select) [a-z]+", "SeLeCt\u0020a select\u0020A"),
    (r"(?i)straße|k", "STRAßE STRASSE K k K"),
    (r"(?i)[i-k]+", "iJK İı"),
    (r"\w+", "abc é日本 a-b _1 \u0301"),
    (r"\W+", "-- a é"),
    (r"\s*\S+\s*", "a \u00a0a\u2003 \x1ca"),
    (r"\d+", "12 ٣ ¾"),
    (r"(?a)\w+\d", "a1 é1 a٣"),
    (r"[а-яё]+", "привет Привет ёж"),
    (r"[一-龥]{1,4}", "日本 日本語文字"),
    (r"[^\x00-\x7f]+", "é日本 a"),
    (r"[\u00e0-\u00ff]\U0001f600?", "é é😀 😀"),
    (r"[^a]", "b é \n a"),
    (r"[^\W\d_]+", "abc é a1"),
    (r"[\w.-]+", "a.b-c a,b"),
    (r".", "a é 😀 \n"),
    (r"(?s).", "a \n ab"),
    (r".*", "a\nb ab"),
    (r"a*", "aaa b"),
    (r"a+?b??", "aab a b"),
    (r"a{3}", "aaa aa aaaa"),
    (r"a{2,}", "a aa aaaaa"),
    (r"a{,2}b", "b aab aaab"),
    (r"(ab){1,3}", "ab abab abababab"),
    (r"(a?){3}", "aaa aaaa"),
    (r"(a*)*b", "b aaab a"),
    (r"()|a", "a aa"),
    (r"", "a"),
    (r"x{,y", "x{,y x"),
    (r"[]a]+", "]a b"),
    (r"[a\]^-]+", "a]^- b"),
    (r"[[:alpha:]]", "a] :] l b]"),
    (r"[a&&b]+", "a&b b c"),
    (r"\.\*\+\?\(\)\[\]\{\}\|\\\^\$/", r".*+?()[]{}|\^$/ a"),
    (r"^abc$", "abc ab"),
    (r"^a$|^b$", "a b ab"),
    (r"\Aab\Z", "ab a"),
    (r"(?x) a b # a comment", "ab a\u0020b"),
    (r"(?P<year>\d{4})-(?P<month>\d\d)", "2024-01 2024"),
    (r"#([0-9a-fA-F]{3}){1,2}", "#fff #a1b2c3 #ffff"),
    (r'"([^"\\]|\\.)*"', '"a\\"b" "a"b"'),
    (r"[A-Z]{2}\d{2}( ?[A-Z0-9]{4}){2,7}", "DE44\u00205001\u00200517 D1"),
    (r"v?\d+\.\d+\.\d+(-[a-z]+(\.\d+)?)?", "v1.2.3-rc.1 1.2"),
]

MORE = [
    r"[1-9]\d{0,2}(\.\d{3})*,\d{2}",
    r"[+-]?(\d+\.?\d*|\.\d+)",
    r"0b[01]+|0o[0-7]+",
    r"[IVXLCDM]+",
    r"\d+(st|nd|rd|th)",
    r"(\d{1,2}:)?\d{1,2}:\d{2}",
    r"P(\d+Y)?(\d+M)?(\d+D)?",
    r"\d{1,2}\.\d{1,2}\.\d{4}",
    r"Q[1-4] \d{4}",
    r"W(0[1-9]|[1-4]\d|5[0-3])",
    r"[^@\s]+@[^@\s]+\.[^@\s]+",
    r"[a-z]+(\.[a-z]+)*@(a|b)\.com",
    r"((25[0-5]|2[0-4]\d|[01]?\d?\d)(\.|$)){4}|x",
    r"(\d{1,3}\.){3}\d{1,3}/(3[0-2]|[12]?\d)",
    r"[a-z0-9]([a-z0-9-]{0,3}[a-z0-9])?(\.[a-z]{2,3}){1,2}",
    r"/([a-z]+/)*[a-z]*",
    r"[a-z]+://[a-z]+(/[a-z]*)*",
    r"\?([a-z]=\d&)*[a-z]=\d",
    r"a|aa|aaa",
    r"aaa|aa|a",
    r"ab|abab|ababab",
    r"(a|ab|abc)+",
    r"(no|not|nothing|none)",
    r"yes|ye|y",
    r"(a|b|ab)(b|ba|)",
    r"do|double|done?",
    r"(x|xy)(z|yz)",
    r"\S",
    r"\D+",
    r"[\d.]+",
    r"[\w]+-[\W]+",
    r"[^\d\s]+",
    r"[à-ý]+",
    r"[\u4e00-\u4eff]",
    r"é+|e\u0301+",
    r"[^\u0000-\u00ff]",
    r"(?i)[à-ý]x",
    r"(?i)ΑΒ|σ",
    r"(?a)\w+",
    r"(?a)\d\D",
    r"(?as)\S.",
    r"\x41\u0042[\x43-\x45]",
    r"\t|\n|\r|\f|\v",
    r"[\t\n ]+",
    r"\\[nrt]",
    r"a{0}",
    r"a{0,0}b",
    r"(a{1,2}){2}",
    r"(a{2,}b?){1,2}",
    r"(?:a|b){2,4}",
    r"((a|b)c?)*",
    r"a?a?a?aaa",
    r"(a*)+",
    r"(a|a)*",
    r"(a|b)*abb",
    r"([ab]*a[ab]{3})",
    r"(0|1(01*0)*1)+",
    r"b*(ab*ab*)*",
    r"(?=)?",
    r"[ab](?#note)1",
    r"[.]|[*]|[\\]",
    r"[-a]+",
    r"[a-]+",
    r"[]-a]+",
    r"\{a\}",
    r"a{",
    r"a{,",
    r"a{1",
    r"(?P<x>a)(?:b)",
    r"^(a|b)$",
    r"^a|b$",
    r"(?m)^a$",
    r"(?x:a b)c d",
    r"a.b",
    r"(?s)a.b",
    r"a[^b]b",
]
MORE.remove(r"(?=)?")
MORE.remove(r"((25[0-5]|2[0-4]\d|[01]?\d?\d)(\.|$)){4}|x")


def _drawn(rng: random.Random, depth: int) -> str:
    """A random pattern of at most `depth` levels."""
    if not depth or rng.random() < 0.2:
        return rng.choice(["a", "b", "1", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "[a1]", "é", "ab"])
    parts = [_drawn(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    match rng.randrange(3):
        case 0:
            return "".join(parts)
        case 1:
            return f"({'|'.join(parts)})"
    return f"(?:{parts[0]})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?", "??"])


def _patterns(count: int) -> list[str]:
    rng, patterns = random.Random(0), dict.fromkeys([*(pattern for pattern, _ in REAL), *MORE])
    while len(patterns) < count:
        patterns[_drawn(rng, 3)] = None
    return list(patterns)


PATTERNS = _patterns(210)


@dataclass(frozen=True)
class OracleComparison:
    """The number of texts, the number that interegular judged too, and (oracle, text, expected) of mismatches."""

    num_texts: int
    num_interegular: int
    mismatches: list[tuple[str, str, bool]]


def compare_with_oracles(pattern: str, seed: int, num_texts: int) -> OracleComparison:
    """Compares the texts that the masks of `pattern` accept with re.fullmatch and interegular.

    The texts are short ones over characters of the pattern, random ones from interegular's automaton, and
    copies with one change. Each is divided into random tokens.
    """
    rng = random.Random(seed)
    grammar = build_grammar(compile_spec(Regex(pattern), WORDS), WORDS)
    second = _second_oracle(pattern)
    compiled, mismatches, num_interegular = re.compile(pattern), list[tuple[str, str, bool]](), 0
    texts = _texts(pattern, second, rng, num_texts)
    for text in texts:
        expected = compiled.fullmatch(text) is not None
        if _passes(grammar, text, rng) is not expected:
            mismatches.append(("re", text, expected))
        if second is not None and text.isascii():
            num_interegular += 1
            if second.accepts(text) is not expected:
                mismatches.append(("interegular", text, expected))
    return OracleComparison(len(texts), num_interegular, mismatches)


def _second_oracle(pattern: str) -> Any:
    """interegular's automaton, or None for syntax that it rejects or reads differently."""
    if re.search(
        r"[\^$]|\(\?[a-zP#(]|\[\[|\\[uUAZbB]|\\\d|\{,|\{(?!\d)|\{\d+(?![\d,}])|\{\d+,\d*(?![\d}])|\[\]|\\[fv]", pattern
    ):
        return None
    try:
        return interegular.parse_pattern(pattern).to_fsm()
    except (interegular.InvalidSyntax, interegular.Unsupported):
        return None


def _texts(pattern: str, second: Any, rng: random.Random, count: int) -> list[str]:
    own = sorted({char for char in pattern if char.isalnum() or char in ".-@:/,+ "})
    letters = rng.sample(own, min(len(own), 4)) + ["a"]
    short = ["".join(some) for size in range(5) for some in product(dict.fromkeys(letters), repeat=size)]
    texts = rng.sample(short, min(len(short), count // 2))
    if second is not None:
        texts += [_drawn_text(second, rng) for _ in range(count // 4)]
    while len(texts) < count:
        text, char = rng.choice(texts), rng.choice([*letters, *"1é日\n Z_"])
        at = rng.randrange(len(text) + 1)
        texts.append(text[:at] + char + text[at + rng.randrange(2) :])
    return list(dict.fromkeys(texts)) if len(set(texts)) > count * 0.9 else texts


def _drawn_text(automaton: Any, rng: random.Random) -> str:
    """A random path through interegular's automaton; its non-string symbol is any other character."""
    text, state = "", automaton.initial
    while len(text) < 14 and not (state in automaton.finals and rng.random() < 0.3):
        transitions = [(key, to) for key, to in automaton.map.get(state, {}).items() if automaton.islive(to)]
        if not transitions:
            break
        key, state = rng.choice(transitions)
        symbols = automaton.alphabet.by_transition[key]
        char = rng.choice(symbols)
        text += char if isinstance(char, str) else rng.choice("q?é")
    return text


def _passes(grammar: Grammar, text: str, rng: random.Random) -> bool:
    """Whether the masks allow randomly chosen tokens of `text`, and EOS after them."""
    matcher, row, rest = grammar.matcher(), np.zeros(mask_words(len(WORDS)), np.int32), text.encode()
    while rest:
        fitting = [size for size in range(1, LONGEST + 1) if rest[:size] in IDS and len(rest) >= size]
        size = rng.choice(fitting)
        token = IDS[rest[:size]]
        matcher.fill_mask(row)
        if not row[token // 32] >> (token % 32) & 1:
            return False
        if not matcher.accept(token):
            raise AssertionError("`accept` rejects a token that the mask allows")
        rest = rest[size:]
    matcher.fill_mask(row)
    return bool(row[0] & 1)
