"""`best_of`, `vote` and `map`: patterns over forks, written in the language itself, so that they can be adapted."""

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
    """Appends `expr` in `n` branches and continues with the best one. Returns the scores of all branches.

    `by(branch)` returns a number; the highest wins. It gets a fork of the branch, so a judge that it appends leaves no
    trace in the text. To run all judges in parallel, let `by` only append and return a function that reads the score.

    >>> best_of(s, 4, gen("proof"), by=lambda b: len(b["proof"]))       # doctest: +SKIP
    """
    _check_function("best_of", "by", by)
    branches = _sampled("best_of", s, n, expr)
    judges = [branch.fork(1)[0] for branch in branches]
    results: list[Any] = [by(judge) for judge in judges]
    scores = [_score(result() if callable(result) else result) for result in results]
    branches.adopt(max(range(n), key=scores.__getitem__))
    return scores


def vote(s: ProgramState, n: int, expr: str | Expr, name: str) -> Any:
    """Appends `expr` in `n` branches and continues with one whose variable `name` has the most frequent value. Returns
    that value.

    This is self-consistency (Wang et al. 2022, arXiv:2203.11171).

    >>> vote(s, 5, "Think: " + gen("why") + " Answer: " + gen("answer", type=int), "answer")     # doctest: +SKIP
    42
    """
    branches = _sampled("vote", s, n, expr)
    texts = [branch.text_of(name).strip() for branch in branches]
    winner = texts.index(Counter(texts).most_common(1)[0][0])
    branches.adopt(winner)
    return s[name]


def map(s: ProgramState, items: Iterable[Item], write: Callable[[ProgramState, Item], object]) -> ProgramStateGroup:
    """Forks one branch per item, calls `write(branch, item)` for each and joins them. Returns the branches.

    New variables of the branches become lists in `s`, in the order of the items.

    >>> plait.map(s, chapters, lambda b, text: b.user(text) or b.assistant(gen("summary")))      # doctest: +SKIP
    """
    _check_function("map", "write", write)
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InputError(f"map takes a list of items, one per branch, not {items!r:.80}")
    item_list: Sequence[Item] = list(items)
    if not item_list:
        raise InputError("map got no items; check for an empty list before the call")
    branches = s.fork(len(item_list))
    for branch, item in zip(branches, item_list, strict=True):
        write(branch, item)
    branches.join()
    return branches


def _sampled(where: str, s: ProgramState, n: int, expr: str | Expr) -> ProgramStateGroup:
    if not isinstance(s, ProgramState):
        raise InputError(f"{where} takes the state of a plain program, not {type(s).__name__}; use fork instead")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"{where}: the number of branches must be at least 1, not {n!r:.40}")
    branches = s.fork(n)
    branches += expr
    return branches


def _check_function(where: str, name: str, value: object) -> None:
    if not callable(value):
        raise InputError(f"{where}: {name} must be a function, not {value!r:.80}")


def _score(value: Any) -> float:
    with contextlib.suppress(TypeError):
        if not isinstance(value, str | bytes | bytearray) and not math.isnan(score := float(value)):
            return score  # NaN is refused: no comparison with it is true, so the first branch would always win
    raise InputError(f"best_of: by must return a number for each branch, not {value!r:.80}; convert text with int(...)")
