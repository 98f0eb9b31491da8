"""`GrammarLogitsProcessor`: a grammar as a logits processor of transformers' `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plait.constrained.grammar import Grammar, Matcher, mask_words
from plait.constrained.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch


class GrammarLogitsProcessor:
    """Forbids, at each step of `generate`, the tokens that the grammar does not allow.

    Every row of the batch has a text of its own, which begins behind the prompt; beams may change places. One processor
    serves one call of `generate` after another, not two at once. Assisted decoding, which scores several tokens in one
    step, is not supported.

    >>> processor = GrammarLogitsProcessor(grammar, vocabulary)                           # doctest: +SKIP
    >>> model.generate(**inputs, max_new_tokens=40, logits_processor=[processor])         # doctest: +SKIP

    `vocabulary`: the one that the grammar was compiled for. Where the model has more logits, as padding, they are
    forbidden. Raises ValueError for fewer logits and for a text that does not match the grammar, and GrammarError where
    a matcher refuses to go on (see `Matcher`). TypeError for a constraint that is not compiled.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        if not isinstance(grammar, Grammar):
            raise TypeError(f"compile the constraint with compile_grammar first; this is {type(grammar).__name__}")
        self._grammar = grammar
        self._vocabulary_size = len(vocabulary)
        self._last_ids: torch.Tensor | None = None  # int64 [B, T], of the last step
        self._prompt_length = 0
        self._matchers: list[tuple[list[int], Matcher]] = []  # each row's tokens behind the prompt and their matcher

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`input_ids`: int64 [B, T], the texts so far. `scores`: float [B, V], their logits.

        Returns logits [B, V] with -inf for forbidden tokens.
        """
        import torch

        if not self._continues(input_ids):
            self._prompt_length, self._matchers = input_ids.shape[1], []
        self._last_ids = input_ids.clone()
        self._matchers = self._follow(input_ids[:, self._prompt_length :].tolist())
        size = self._vocabulary_size
        if scores.shape[1] < size:
            raise ValueError(f"the model has {scores.shape[1]} logits, the grammar's vocabulary {size} tokens")
        allowed = np.zeros(scores.shape, bool)
        words = np.zeros(mask_words(size), np.int32)
        for row, (_, matcher) in zip(allowed, self._matchers, strict=True):
            matcher.fill_mask(words)
            row[:size] = np.unpackbits(words.view(np.uint8), count=size, bitorder="little")
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)  # type: ignore[return-value]

    def _continues(self, input_ids: torch.Tensor) -> bool:
        """Returns whether each row is a row of the last step with one more token."""
        last = self._last_ids
        if last is None or input_ids.shape[1] != last.shape[1] + 1:
            return False
        is_last = (input_ids[:, None, :-1] == last[None].to(input_ids.device)).all(-1)  # [B, rows of the last step]
        return bool(is_last.any(1).all())

    def _follow(self, texts: list[list[int]]) -> list[tuple[list[int], Matcher]]:
        """Returns each text with its matcher: one of the last step where a row goes on from there, else a new one."""
        unused = self._matchers
        advanced: list[tuple[list[int], Matcher]] = []
        for text in texts:
            place = next((i for i, (before, _) in enumerate(unused) if before == text[:-1]), None) if text else None
            matcher = self._grammar.matcher() if place is None else unused[place][1]
            if place is not None:
                unused = unused[:place] + unused[place + 1 :]
            for token in text if place is None else text[-1:]:
                if not matcher.is_terminated and not matcher.accept(token):  # what follows the end is padding
                    raise ValueError(f"token {token} behind the prompt does not match the grammar")
            advanced.append((text, matcher))
        return advanced
