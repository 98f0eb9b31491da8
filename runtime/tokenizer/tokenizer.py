"""Converts text to token ids and back. Only text marked as the chat template's own can become a control token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock

from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.errors import ContextOverflow, InputError
from plait.runtime.model_files.gguf import open_gguf
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import AddedToken, TokenizerDefinition
from plait.runtime.tokenizer.from_gguf import definition_from_gguf
from plait.runtime.tokenizer.from_hf import definition_from_folder
from plait.runtime.tokenizer.literal_pattern import find_in_pieces, literal_pattern

LONG_TEXT_CHARS = 5_000  # other threads can run while a longer text is tokenized


def load_tokenizer(model_path: Path, *, vocab_size: int | None = None, is_for_ids: bool = False) -> Tokenizer:
    """Loads the tokenizer of a .gguf file or of a Hugging Face folder.

    `vocab_size` is the model's number of logits; by default it is read from the file or from config.json.
    `is_for_ids`: the caller rarely tokenizes a text, so what that needs is built for the first text.
    Raises ModelNotFound, CorruptModel or UnsupportedModel.

    >>> load_tokenizer(locate_model()).encode_plain("Hello")  # doctest: +SKIP
    [19556]
    """
    definition = _definition(model_path, vocab_size)
    if not is_for_ids:
        definition.backends.pair()  # finds errors
    return Tokenizer(definition)


def _definition(model_path: Path, vocab_size: int | None) -> TokenizerDefinition:
    """What the files say. Clients that are created at the same time, as those of replicas, wait for one reader."""
    try:
        version = _version(model_path)
    except OSError:
        return _read(model_path, vocab_size)  # whose errors name the file
    with _reading.setdefault(model_path, Lock()):
        return _definition_of(model_path, version, vocab_size)


_reading: dict[Path, Lock] = {}  # held while a model's files are read


def _version(model_path: Path) -> tuple[tuple[str | int, ...], ...]:
    """What changes with the files. Raises OSError."""
    paths = sorted(model_path.iterdir()) if model_path.is_dir() else [model_path]
    return tuple(
        (path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        for path in paths
        for status in [path.stat()]
    )


@lru_cache(maxsize=4)
def _definition_of(
    model_path: Path, version: tuple[tuple[str | int, ...], ...], vocab_size: int | None
) -> TokenizerDefinition:
    """What files of this version say. Further clients of a process, as after a restart, load the same one."""
    return _read(model_path, vocab_size)


def _read(model_path: Path, vocab_size: int | None) -> TokenizerDefinition:
    if model_path.is_dir():
        return definition_from_folder(model_path, vocab_size)
    return definition_from_gguf(open_gguf(model_path, metadata_only=True).metadata, vocab_size)


class Tokenizer:
    """A model's tokenizer. Create it with `load_tokenizer`. Thread-safe.

    bos_id, add_bos: the BOS token, and whether the model wants it at the start of a text; the caller prepends it.
    suffix_ids: tokens that the model's own tokenizer appends, see `encode_with_special_tokens`.
    eos_ids: tokens that end a text.
    control_ids: tokens that are not text.
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
        self._added_pattern = literal_pattern(definition.added_tokens)
        self._longest_added = max(map(len, definition.added_tokens), default=0)

    def replace_chat_template(self, source: str) -> None:
        """Uses another chat template than that of the model's files. For the owner of a tokenizer, before its use."""
        eos = next((self.control_texts[token] for token in self.eos_ids if token in self.control_texts), "")
        bos = "" if self.bos_id is None else self.control_texts.get(self.bos_id, "")
        if self.chat_template is not None:
            bos, eos = self.chat_template.bos_token, self.chat_template.eos_token
        self.chat_template = ChatTemplate(source, bos, eos)
        self.__dict__.pop("_template_texts", None)
        self._template_text_ids.clear()

    @property
    def vocab_size(self) -> int:
        """The number of logits; every id is below it."""
        return len(self._definition.token_bytes)

    @property
    def added_texts(self) -> frozenset[str]:
        """The texts that become a single token in control text, such as "<|im_end|>"."""
        return frozenset(self._definition.added_tokens)

    @cached_property
    def control_texts(self) -> dict[int, str]:
        """The text of each control token that has one."""
        return {token.id: text for text, token in self._definition.added_tokens.items() if token.id in self.control_ids}

    @cached_property
    def _template_texts(self) -> frozenset[str]:
        """The plain texts of the chat template between control tokens."""
        literals = frozenset() if self.chat_template is None else self.chat_template.literals
        return frozenset(
            piece
            for text in literals
            for piece in self._split_added_tokens([(text, True)])
            if isinstance(piece, str) and piece
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary for constrained decoding and detokenizing."""
        return Vocabulary(self._definition.token_bytes, self.eos_ids, self.encode_plain, self.control_texts)

    def encode(
        self, parts: Sequence[tuple[str, bool]], *, at_start: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Tokenizes consecutive (text, control) parts.

        Control tokens are recognised only within a part whose `control` is true. All other text is plain, whatever it
        contains. Adjacent plain text is tokenized as one text, independent of the borders between parts. `at_start`:
        the parts begin the session's text, so SentencePiece's leading space applies. Raises InputError, and
        ContextOverflow for a long text of more than `max_tokens`, whose ids are not made.

        >>> tokenizer.encode([("<|im_start|>", True), ("<|im_start|>", False)])  # doctest: +SKIP
        [1, 44, 108, 306, 79, 3738, 108, 46]
        """
        ids: list[int] = []
        pending: list[str] = []
        before: AddedToken | None = None
        is_initial = at_start
        for piece in self._split_added_tokens(parts):
            if isinstance(piece, str):
                pending.append(piece)
                continue
            ids += self._encode_run(pending, is_initial, before, piece, max_tokens)
            ids.append(piece.id)
            pending, before, is_initial = [], piece, self._definition.prefix_after_control
        return ids + self._encode_run(pending, is_initial, before, None, max_tokens)

    def _split_added_tokens(self, parts: Sequence[tuple[str, bool]]) -> Iterator[str | AddedToken]:
        """Yields plain text and added tokens, in order."""
        for text, control in parts:
            if not isinstance(text, str):
                raise InputError(f"a text to tokenize must be a str, not {type(text).__name__}")
            end = 0
            if control and self._added_pattern is not None:
                for match in find_in_pieces(self._added_pattern, text, self._longest_added):
                    yield text[end : match.start()]
                    yield self._definition.added_tokens[match[0]]
                    end = match.end()
            yield text[end:]

    def _encode_run(
        self,
        pieces: list[str],
        is_initial: bool,
        before: AddedToken | None,
        after: AddedToken | None,
        max_tokens: int | None,
    ) -> list[int]:
        """Tokenizes plain text between the added tokens `before` and `after`."""
        text = "".join(pieces)
        if before is not None and before.strip_right:
            text = text.lstrip()
        if after is not None and after.strip_left:
            text = text.rstrip()
        if not text:
            return []
        cached_ids = self._template_text_ids.get((text, is_initial))
        if cached_ids is not None:
            return cached_ids
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError("the text holds half of a surrogate pair, which is not a character") from error
        continuation, initial = self._definition.backends.pair()
        backend = initial if is_initial else continuation
        ids: list[int]
        if (
            len(text) > LONG_TEXT_CHARS
        ):  # of the library's functions only those for lists release the interpreter's lock
            encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
            if max_tokens is not None and len(encoding) > max_tokens:
                raise ContextOverflow(f"a text has {len(encoding)} tokens, more than any prompt here can have")
            ids = encoding.ids
        else:
            ids = backend.encode(text, add_special_tokens=False).ids
        if text in self._template_texts:  # only template text is cached: user text must not be kept
            self._template_text_ids[text, is_initial] = ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Tokenizes plain text that continues another text.

        >>> tokenizer.encode_plain(" world")  # doctest: +SKIP
        [905]
        """
        return self.encode([(text, False)])

    def encode_with_special_tokens(self, text: str, prompt: str = "") -> list[int]:
        """Tokenizes a complete text as the input of an embedding model, with BOS and `suffix_ids`.

        The text is plain, whatever it contains. The model's own `prompt` comes before it and may name control tokens.
        """
        bos = [self.bos_id] if self.bos_id is not None and self.add_bos else []
        return [*bos, *self.encode([(prompt, True), (text, False)], at_start=True), *self.suffix_ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids. Control tokens are omitted, invalid UTF-8 becomes U+FFFD. Raises InputError.

        >>> tokenizer.decode([905, 2])  # doctest: +SKIP
        ' world'
        """
        token_bytes = self._definition.token_bytes
        for i in ids:
            if not 0 <= i < len(token_bytes):
                raise InputError(f"the token id {i} is not in 0 to {len(token_bytes) - 1}")
        return b"".join([token_bytes[i] for i in ids]).decode("utf-8", "replace")
