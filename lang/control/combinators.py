"""Patterns over forks, written in the language itself: best_of, vote, map. Copy one where it does not fit."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from plait.lang.core.expressions import Expr
from plait.lang.core.state import ProgramState, ProgramStateGroup
from plait.runtime.errors import InputError

Item = TypeVar("Item")


def best_of(s: ProgramState, n: int, expr: str | Expr, by: Callable[[ProgramState], float]) -> list[float]:
    """Goes on with the best of `n` branches that append `expr`; gives the scores of all.

    `by` scores a branch, the highest wins. It gets a branch of its own: a judge that it appends leaves no trace. All
    judges are asked before any is read, if `by` only appends and gives a function that reads.

    >>> best_of(s, 4, gen("proof"), by=lambda b: len(b["proof"]))       # doctest: +SKIP
    """
    _check_function("best_of", "by", by)
    branches = _sampled("best_of", s, n, expr)
    judges = [branch.fork(1)[0] for branch in branches]
    asked: list[Any] = [by(judge) for judge in judges]
    scores = [_score(each() if callable(each) else each) for each in asked]
    branches.adopt(max(range(n), key=scores.__getitem__))
    return scores


def vote(s: ProgramState, n: int, expr: str | Expr, name: str) -> Any:
    """Goes on with the first of `n` branches whose variable `name` has the value that most of them have; that value.

    Self-consistency (Wang et al. 2022, arXiv:2203.11171).

    >>> vote(s, 5, "Think: " + gen("why") + " Answer: " + gen("answer", type=int), "answer")     # doctest: +SKIP
    42
    """
    branches = _sampled("vote", s, n, expr)
    texts = [branch.text_of(name).strip() for branch in branches]
    winner = texts.index(Counter(texts).most_common(1)[0][0])
    branches.adopt(winner)
    return s[name]


def map(s: ProgramState, items: Iterable[Item], write: Callable[[ProgramState, Item], object]) -> ProgramStateGroup:
    """One branch for each item, written by `write(branch, item)` and joined; the branches, to be read.

    New variables of the branches are lists in `s`, in the order of the items.

    >>> plait.map(s, chapters, lambda b, text: b.user(text) or b.assistant(gen("summary")))      # doctest: +SKIP
    """
    _check_function("map", "write", write)
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InputError(f"map takes a list of items, one for each branch, not {items!r:.80}")
    given: Sequence[Item] = list(items)
    if not given:
        raise InputError("map has no items to make branches of: ask whether there are any before it")
    branches = s.fork(len(given))
    for branch, item in zip(branches, given, strict=True):
        write(branch, item)
    branches.join()
    return branches


def _sampled(where: str, s: ProgramState, n: int, expr: str | Expr) -> ProgramStateGroup:
    if not isinstance(s, ProgramState):
        raise InputError(f"{where} takes the state of a plain program, not {type(s).__name__}; write it with fork")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"{where}: the number of branches must be at least 1, not {n!r:.40}")
    branches = s.fork(n)
    branches += expr
    return branches


def _check_function(where: str, name: str, given: object) -> None:
    if not callable(given):
        raise InputError(f"{where}: {name} must be a function, not {given!r:.80}")


def _score(given: Any) -> float:
    with contextlib.suppress(TypeError):
        if not isinstance(given, str | bytes | bytearray) and not math.isnan(score := float(given)):
            return score  # NaN is above and below nothing: the first branch would win, whatever the others have
    raise InputError(f"best_of: by must give a number for each branch, not {given!r:.80}; of text int(...) makes one")
