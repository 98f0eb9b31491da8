"""Cuts an output off at a byte, also inside a token: the rest of that token is tokenized again."""

from __future__ import annotations

from plait.constrained import Vocabulary
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.kv_cache.prefix_cache import PrefixCache


class OutputCutter:
    """Cuts outputs of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, cache: PrefixCache) -> None:
        self.vocabulary = vocabulary
        self.cache = cache

    def cut(self, request: GenerationRequest, num_bytes: int) -> None:
        """Ends the output after `num_bytes` bytes, and appends tokens for what is left of the last token."""
        num_kept, rest = self.split(request, num_bytes)
        if num_kept == 0 and request.border is not None:
            self._cut_border(request, rest)
            return
        length = request.output_start + num_kept
        request.seq.tokens.truncate(length)
        if request.seq.num_computed > length:
            self.cache.truncate(request.seq, length)
        del request.byte_ends[num_kept:]
        for token in rest:
            request.append(token, len(self.vocabulary.token_bytes[token]))

    def _cut_border(self, request: GenerationRequest, rest: list[int]) -> None:
        """Replaces the output, whose first token begins in the prompt, by that part of the prompt and `rest`."""
        self.restore_prompt(request)
        for token in rest:
            request.append(token, len(self.vocabulary.token_bytes[token]))

    def restore_prompt(self, request: GenerationRequest) -> None:
        """Removes the output, but for the part of its first token that belongs to the prompt."""
        border, start = request.border, request.output_start
        assert border is not None
        request.border = None
        request.seq.tokens.truncate(start)
        if request.seq.num_computed > start:
            self.cache.truncate(request.seq, start)
        request.byte_ends.clear()
        for token in self._tokenize(border.head):
            request.append_to_prompt(token)

    def split(self, request: GenerationRequest, num_bytes: int) -> tuple[int, list[int]]:
        """Returns how many output tokens the first `num_bytes` bytes hold, and tokens for the rest of these bytes."""
        num_whole = 0
        while num_whole < request.num_output and request.byte_ends[num_whole] <= num_bytes:
            num_whole += 1
        cut_tokens = request.output_tokens(num_whole, request.num_output)
        cut_bytes = b"".join(self.vocabulary.token_bytes[token] for token in cut_tokens)
        start = request.byte_ends[num_whole - 1] if num_whole else 0
        return num_whole, self._tokenize(cut_bytes[: num_bytes - start])

    def _tokenize(self, data: bytes) -> list[int]:
        """Returns tokens that spell exactly `data`."""
        if not data:
            return []
        try:
            tokens = [int(token) for token in self.vocabulary.encode(data.decode())]
            if b"".join(self.vocabulary.token_bytes[token] for token in tokens) == data:
                return tokens
        except UnicodeDecodeError:
            pass  # the output held invalid UTF-8 before the cut: spell its bytes instead
        return self.vocabulary.spell_bytes(data)
