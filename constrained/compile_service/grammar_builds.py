"""Builds the grammars of compiled constraints in the caller's process, in a thread if that takes long."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from time import thread_time
from typing import Generic, TypeVar

from plait.constrained.compile_service.worker_messages import TokenDfaArrays, unpack_dfa
from plait.constrained.compiler import build_grammar
from plait.constrained.grammar import Grammar
from plait.constrained.guidance.inner_matcher import warm_up
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource
from plait.constrained.regex.char_classes import warm_up_classes
from plait.constrained.specs import GrammarError
from plait.constrained.tokens.vocabulary import Vocabulary
from plait.host.background_calls import BackgroundCalls

QUICK_S = 0.005  # of CPU; a grammar that took the worker longer is built in a thread, not in the caller's loop
NICENESS = 11  # of such a thread: it takes 8% of a core that another thread wants
LOWERED_NICENESS = 19  # 1.5%; not the idle class, in which a thread that has Python's lock may keep it for seconds

Key = TypeVar("Key")


class GrammarBuilds(Generic[Key]):
    """The builds of one vocabulary that run in threads. `running`: the keys of those that the caller waits for.

    >>> builds = GrammarBuilds[str](vocabulary)                           # doctest: +SKIP
    >>> builds.open()                                                     # doctest: +SKIP
    >>> builds.begin("a", source)                                         # doctest: +SKIP
    >>> builds.collect()                                                  # doctest: +SKIP
    [('a', <LlguidanceGrammar>, 0.012)]
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._warm_up_lock, self._is_warming_up = Lock(), False
        self.warm_up_pieces = warm_up_pieces(vocabulary)  # those that are left
        self._calls: BackgroundCalls[Key, tuple[Grammar | GrammarError, float]] | None = None  # set while open
        self.running: set[Key] = set()

    def open(self) -> None:
        """Allows builds until `close`."""
        self._calls = self._calls or BackgroundCalls(NICENESS)

    def close(self) -> None:
        """Forgets the running builds."""
        self.running.clear()
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def filenos(self) -> list[int]:
        """Returns the descriptors that are readable when there is something to `collect`."""
        return [] if self._calls is None else [self._calls.fileno()]

    def warm_up(self) -> None:
        """Builds the tables that all grammars share; waits if another thread is building them."""
        while self.warm_up_pieces:
            self.warm_up_piece()

    def begin_warm_up(self) -> None:
        """Calls `warm_up` in a thread, once."""
        if self.warm_up_pieces and not self._is_warming_up:
            self._is_warming_up = True
            Thread(target=self.warm_up, daemon=True, name="plait-warm-up").start()

    def warm_up_piece(self) -> None:
        """Builds the next of the tables, or waits if another thread is building it."""
        with self._warm_up_lock:
            if self.warm_up_pieces:
                try:
                    self.warm_up_pieces[0]()
                finally:  # what fails here fails again where it is needed
                    del self.warm_up_pieces[0]

    def is_quick(self, answer: TokenDfaArrays | LlguidanceSource, spent_s: float) -> bool:
        """Returns whether the caller may build a grammar in its loop that a worker compiled in `spent_s` CPU seconds.

        So may a caller for whom `open` was not called.
        """
        if self._calls is None:
            return True
        if self.warm_up_pieces:
            return False
        if isinstance(answer, LlguidanceSource):
            return spent_s <= QUICK_S
        return all(partition in self._vocabulary.token_tries for partition in answer.partitions)

    def begin(self, key: Key, answer: TokenDfaArrays | LlguidanceSource, *, is_lowered: bool = False) -> None:
        """Starts to build a grammar in a thread, which is_lowered gives the lowest priority but the idle class.

        Raises RuntimeError if not open.
        """
        if self._calls is None:
            raise RuntimeError("the builds are closed")
        self.running.add(key)
        more_niceness = LOWERED_NICENESS - NICENESS if is_lowered else 0
        self._calls.begin(key, lambda: self._build(answer), more_niceness)

    def collect(self) -> list[tuple[Key, Grammar | GrammarError, float]]:
        """Returns the grammars that are built, those included whose key was removed from `running`, and the CPU seconds
        that each took."""
        built = [] if self._calls is None else self._calls.collect()
        self.running.difference_update(key for key, _ in built)
        return [(key, answer, cpu_s) for key, (answer, cpu_s) in built]

    def _build(self, answer: TokenDfaArrays | LlguidanceSource) -> tuple[Grammar | GrammarError, float]:
        self.warm_up()
        start = thread_time()
        grammar = grammar_of(answer, self._vocabulary)
        return grammar, thread_time() - start


def warm_up_pieces(vocabulary: Vocabulary) -> list[Callable[[], object]]:
    """Returns calls that build the tables which all grammars share. Those already built take no time.

    Libraries build the last two in one call each, which keeps all threads of the interpreter waiting.

    >>> for build in warm_up_pieces(vocabulary): build()                  # doctest: +SKIP
    """
    return [vocabulary.warm_up, warm_up_classes, lambda: warm_up(vocabulary), vocabulary.warm_up_forced_tokens]


def grammar_of(answer: TokenDfaArrays | LlguidanceSource, vocabulary: Vocabulary) -> Grammar | GrammarError:
    """Builds the grammar of a worker's answer, or returns why it cannot be built.

    >>> grammar_of(LlguidanceSource(LLMatcher.grammar_from_regex("[0-9]+")), vocabulary)          # doctest: +SKIP
    """
    try:
        return build_grammar(answer if isinstance(answer, LlguidanceSource) else unpack_dfa(answer), vocabulary)
    except GrammarError as error:
        return error
