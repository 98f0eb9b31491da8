"""Matchers that follow a script, in place of compiled grammars: for `make_engine_loop(grammars={spec: matcher})`."""

from __future__ import annotations

import gc
import time

import numpy as np
from fake_engine import EOS


def _allow(words, *tokens):
    """Sets the mask `words` to exactly these tokens."""
    words.fill(0)
    for token in tokens:
        words.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


class TextMatcher:
    """Allows the tokens of one text in order, then the end of the output.

    `raises_at`: number of tokens after which `fill_mask` raises. `empty_at`: after which the mask is empty.
    """

    warnings = ()
    num_reasoning_tokens, is_reasoning = 0, False

    def __init__(self, tokens, raises_at=None, empty_at=None):
        self.tokens, self.raises_at, self.empty_at = tokens, raises_at, empty_at
        self.position, self.is_terminated = 0, False

    def matcher(self):
        return TextMatcher(self.tokens, self.raises_at, self.empty_at)

    @property
    def is_accepting(self):
        return self.position == len(self.tokens)

    def fill_mask(self, words):
        if self.position == self.raises_at:
            raise RuntimeError("broken inside")
        if self.position == self.empty_at:
            _allow(words)
        else:
            _allow(words, *self.allowed_tokens())

    def allowed_tokens(self):
        return [*self.tokens, EOS][self.position : self.position + 1]

    def accept(self, token):
        if token not in self.allowed_tokens():
            return False
        self.position += 1
        return True

    def rollback(self, count):
        self.position -= count

    def forced_tokens(self):
        return []


class OptionalTextMatcher(TextMatcher):
    """Accepts every prefix of the text, then nothing but the end of the output."""

    def matcher(self):
        return OptionalTextMatcher(self.tokens)

    @property
    def is_accepting(self):
        return True

    def allowed_tokens(self):
        return [EOS, *self.tokens[self.position : self.position + 1]]


class ForcingMatcher(TextMatcher):
    """Forces some of the tokens. `runs`: {position: number of tokens forced from there on}."""

    def __init__(self, tokens, runs):
        super().__init__(tokens)
        self.runs = runs

    def matcher(self):
        return ForcingMatcher(self.tokens, self.runs)

    def forced_tokens(self):
        return self.tokens[self.position : self.position + self.runs.get(self.position, 0)]


class SlowMatcher(TextMatcher):
    """Spends 0.2 s of CPU time in `fill_mask` (slow_in="mask") or in `accept`.

    With slow_in="collection", a garbage collection that the two may cause does.
    """

    def __init__(self, tokens, slow_in):
        super().__init__(tokens)
        self.slow_in = slow_in

    def matcher(self):
        return SlowMatcher(self.tokens, self.slow_in)

    def _burn(self, method):
        until = time.thread_time() + 0.2
        while method == self.slow_in and time.thread_time() < until:
            pass
        if self.slow_in == "collection":
            gc.callbacks.append(callback := lambda *_: self._spend(until))
            self.garbage = [[] for _ in range(10_000)]
            gc.callbacks.remove(callback)

    @staticmethod
    def _spend(until):
        while time.thread_time() < until:
            pass

    def fill_mask(self, words):
        self._burn("mask")
        super().fill_mask(words)

    def accept(self, token):
        self._burn("accept")
        return super().accept(token)


class UnstartableGrammar:
    """Raises when a matcher is requested."""

    warnings = ()

    def matcher(self):
        raise RuntimeError("no start")
