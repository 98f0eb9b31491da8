"""Text to token ids and back, with one rule: only the chat template's own text can become a control token.

Knows: plain backends, added tokens and how they are kept apart. Must not know: torch, the scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from plait.constrained.vocabulary import Vocabulary
from plait.runtime.errors import InputError
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import AddedToken, TokenizerDefinition
from plait.runtime.tokenizer.from_gguf import definition_from_gguf
from plait.runtime.tokenizer.from_hf import definition_from_folder


def load_tokenizer(model_path: Path, *, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a .gguf file or of a Hugging Face folder.

    `vocab_size` is the model's number of logits; without it, what the file or config.json says. Raises
    ModelNotFound, CorruptModel or UnsupportedModel.

    >>> load_tokenizer(locate_model()).encode_plain("Hello")  # doctest: +SKIP
    [19556]
    """
    if model_path.is_dir():
        return Tokenizer(definition_from_folder(model_path, vocab_size))
    return Tokenizer(definition_from_gguf(open_gguf(model_path, metadata_only=True).metadata, vocab_size))


class Tokenizer:
    """Made by `load_tokenizer`. Safe to use from several threads.

    `bos_id` and `add_bos`: the token a fresh text begins with, and whether the model wants it; the caller
    adds it. `suffix_ids`: what the model's own tokenizer puts behind a whole text, see `encode_with_special_tokens`.
    `eos_ids`: what ends a text. `control_ids`: tokens that are not text.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._definition = definition
        self.bos_id: int | None = definition.bos_id
        self.add_bos: bool = definition.add_bos
        self.suffix_ids: tuple[int, ...] = definition.suffix_ids
        self.eos_ids: tuple[int, ...] = definition.eos_ids
        self.control_ids: frozenset[int] = definition.control_ids
        self.chat_template: ChatTemplate | None = definition.chat_template
        self._template_text_ids: dict[tuple[str, bool], list[int]] = {}
        longest_first = sorted(definition.added_tokens, key=lambda text: (-len(text), text))
        self._added_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @property
    def vocab_size(self) -> int:
        """The number of logits: ids are below it."""
        return len(self._definition.token_bytes)

    @property
    def added_texts(self) -> frozenset[str]:
        """What stands for one token in a chat template's own text, such as "<|im_end|>"."""
        return frozenset(self._definition.added_tokens)

    @cached_property
    def control_texts(self) -> dict[int, str]:
        """The text that stands for each control token that has one."""
        return {token.id: text for text, token in self._definition.added_tokens.items() if token.id in self.control_ids}

    @cached_property
    def _template_texts(self) -> frozenset[str]:
        """What the chat template itself says between control tokens."""
        literals = frozenset() if self.chat_template is None else self.chat_template.literals
        return frozenset(
            p for text in literals for p in self._split_added_tokens([(text, True)]) if isinstance(p, str) and p
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens as constraints see them."""
        return Vocabulary(self._definition.token_bytes, self.eos_ids, self.encode_plain)

    def encode(self, parts: Sequence[tuple[str, bool]], *, at_start: bool = False) -> list[int]:
        """The ids of (text, control) parts that stand one after the other.

        Control tokens are recognised where `control` is true, within one part; all other text is plain,
        whatever it says. Neighbouring plain pieces are tokenized as one text, so where a part ends leaves no
        trace. `at_start`: nothing stands before, so SentencePiece's leading space applies. Raises InputError.

        >>> tokenizer.encode([("<|im_start|>", True), ("<|im_start|>", False)])  # doctest: +SKIP
        [1, 44, 108, 306, 79, 3738, 108, 46]
        """
        ids: list[int] = []
        pending: list[str] = []
        before: AddedToken | None = None
        begins = at_start
        for piece in self._split_added_tokens(parts):
            if isinstance(piece, str):
                pending.append(piece)
                continue
            ids += self._encode_run(pending, begins, before, piece)
            ids.append(piece.id)
            pending, before, begins = [], piece, self._definition.prefix_after_control
        return ids + self._encode_run(pending, begins, before, None)

    def _split_added_tokens(self, parts: Sequence[tuple[str, bool]]) -> Iterator[str | AddedToken]:
        """Plain text and added tokens, in order."""
        for text, control in parts:
            if not isinstance(text, str):
                raise InputError(f"a text to tokenize must be a str, not {type(text).__name__}")
            at = 0
            if control and self._added_pattern is not None:
                for match in self._added_pattern.finditer(text):
                    yield text[at : match.start()]
                    yield self._definition.added_tokens[match[0]]
                    at = match.end()
            yield text[at:]

    def _encode_run(
        self, pieces: list[str], begins: bool, before: AddedToken | None, after: AddedToken | None
    ) -> list[int]:
        """The ids of one run of plain text between two added tokens."""
        text = "".join(pieces)
        if before is not None and before.strip_right:
            text = text.lstrip()
        if after is not None and after.strip_left:
            text = text.rstrip()
        if not text:
            return []
        own = self._template_text_ids.get((text, begins))
        if own is not None:
            return own
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError("the text holds half of a surrogate pair, which is not a character") from error
        backend = self._definition.start if begins else self._definition.plain
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if text in self._template_texts:  # of every conversation; what somebody wrote is kept for no one else
            self._template_text_ids[text, begins] = ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids of plain text that continues another.

        >>> tokenizer.encode_plain(" world")  # doctest: +SKIP
        [905]
        """
        return self.encode([(text, False)])

    def encode_with_special_tokens(self, text: str, prompt: str = "") -> list[int]:
        """The ids of a text that nothing stands before or follows, as a model that embeds texts is given it: with the
        tokens that its own tokenizer puts around it. The text itself is plain, whatever it says; `prompt`, which stands
        before it, is the model's own and may name control tokens."""
        bos = [self.bos_id] if self.bos_id is not None and self.add_bos else []
        return [*bos, *self.encode([(prompt, True), (text, False)], at_start=True), *self.suffix_ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; control tokens are skipped, bytes that are no character become U+FFFD.

        >>> tokenizer.decode([905, 2])  # doctest: +SKIP
        ' world'
        """
        token_bytes = self._definition.token_bytes
        for i in ids:
            if not 0 <= i < len(token_bytes):
                raise InputError(f"the token id {i} is not in 0 to {len(token_bytes) - 1}")
        return b"".join([token_bytes[i] for i in ids]).decode("utf-8", "replace")
