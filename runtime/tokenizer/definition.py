"""The parts of a tokenizer, independent of its file format, and the bytes of its tokens.

Two token alphabets are supported: GPT-2's byte-level letters and SentencePiece's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import tokenizers

from plait.runtime.tokenizer.chat_template import ChatTemplate

SENTENCEPIECE_SPACE = "\u2581"  # SentencePiece writes a space as this character


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched as text before tokenization, in the chat template's text only.

    `strip_left` and `strip_right`: the match includes the white space on that side.
    """

    id: int
    strip_left: bool = False
    strip_right: bool = False


BackendPair = tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]
"""Of plain text that continues another text, and of text at the start of a session, where a space is put."""


class Backends:
    """The backends of a tokenizer, built when they are first needed. Neither recognises added tokens.

    A runtime process needs them only for some constraints, and building them takes half of the time of a tokenizer.
    """

    def __init__(self, build: Callable[[], BackendPair]) -> None:
        self._build: Callable[[], BackendPair] | None = build
        self._lock = threading.Lock()
        self._pair: BackendPair | None = None

    @classmethod
    def of(cls, continuation: tokenizers.Tokenizer, initial: tokenizers.Tokenizer) -> Backends:
        """Backends that exist already."""
        return cls(lambda: (continuation, initial))

    def pair(self) -> BackendPair:
        """Returns both backends. Raises ModelError if the lists that describe them contradict each other."""
        if self._pair is None:
            with self._lock:
                if self._build is not None:
                    self._pair = self._build()
                    self._build = None  # frees what it was built from
        assert self._pair is not None
        return self._pair


@dataclass(frozen=True)
class TokenizerDefinition:
    """Everything a Tokenizer needs.

    backends: tokenize plain text.
    prefix_after_control: text after a control token is tokenized like initial text.
    token_bytes: the bytes of each token; b"" for control tokens.
    suffix_ids: what the file's own tokenizer appends to a complete text. Embedding models are trained with an end
        token.
    """

    backends: Backends
    prefix_after_control: bool
    added_tokens: Mapping[str, AddedToken]
    control_ids: frozenset[int]
    token_bytes: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    chat_template: ChatTemplate | None
    suffix_ids: tuple[int, ...] = ()


_TAGS = (
    "a|b|bbox|blockquote|body|caption|code|div|em|footer|h1|h2|h3|h4|h5|h6|html|i|iframe|img|li|s|span|strong|sub|sup"
    "|table|tbody|td|tfoot|th|thead|tr|u|ul"
)
_TEXT_TOKEN = re.compile(rf"\s+|{SENTENCEPIECE_SPACE}+|</?(?:{_TAGS})>|.")


def is_text_token(text: str) -> bool:
    """Whether an added token is ordinary text: white space or an HTML tag (both in Gemma) or one character (DeepSeek).

    Such tokens are recognised in user text, too. The list is closed, so that a token does not become control text, or
    user text a control token, because a file marks it "user defined".

    >>> is_text_token("\\n\\n"), is_text_token("</table>"), is_text_token("<|im_end|>"), is_text_token("<think>")
    (True, True, False, False)
    """
    return _TEXT_TOKEN.fullmatch(text) is not None


@cache
def unicode_to_byte() -> dict[str, int]:
    """GPT-2's byte-level alphabet: a printable letter for each of the 256 bytes.

    Printable Latin-1 bytes are their own letters. The others are U+0100 and following, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_token_bytes(token: str) -> bytes:
    """Returns the bytes of a token in GPT-2's alphabet. A token with other letters is plain UTF-8 text.

    >>> byte_level_token_bytes("\u0120the")
    b' the'
    """
    letters = unicode_to_byte()
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8", "replace")


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def sentencepiece_token_bytes(token: str) -> bytes:
    """Returns the bytes of a SentencePiece token: `<0x0A>` is one byte, SENTENCEPIECE_SPACE is a space.

    >>> sentencepiece_token_bytes("\u2581the"), sentencepiece_token_bytes("<0x0A>")
    (b' the', b'\\n')
    """
    if token.startswith("<0x") and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(SENTENCEPIECE_SPACE, " ").encode("utf-8", "replace")
