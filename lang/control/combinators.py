"""`best_of`, `vote` and `map`: patterns over forks, written in the language itself, so that they can be adapted."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from plait.lang.core.expressions import Expr
from plait.lang.core.waiting import finish, value_of
from plait.lang.states.async_state import AsyncState, AsyncStateGroup
from plait.lang.states.state import ProgramState, ProgramStateGroup
from plait.runtime.errors import InputError

Item = TypeVar("Item")
R = TypeVar("R")


@overload
def best_of(s: ProgramState, n: int, expr: str | Expr, by: Callable[[ProgramState], Any]) -> list[float]: ...
@overload
def best_of(
    s: AsyncState, n: int, expr: str | Expr, by: Callable[[AsyncState], Any]
) -> Coroutine[Any, Any, list[float]]: ...
def best_of(
    s: ProgramState | AsyncState, n: int, expr: str | Expr, by: Callable[[Any], Any]
) -> list[float] | Coroutine[Any, Any, list[float]]:
    """Appends `expr` in `n` branches and continues with the best one. Returns the scores of all branches.

    `by(branch)` returns a number; the highest wins. It gets a fork of the branch, so a judge that it appends leaves no
    trace in the text. To run all judges in parallel, let `by` only append and return a function that reads the score.

    In an async program it is awaited, and `by` may be `async def`; all judges then run in parallel.

    >>> best_of(s, 4, gen("proof"), by=lambda b: len(b["proof"]))       # doctest: +SKIP
    """
    _check_function("best_of", "by", by)
    return _run(s, _best_of(s, n, expr, by))


async def _best_of(s: ProgramState | AsyncState, n: int, expr: str | Expr, by: Callable[[Any], Any]) -> list[float]:
    branches = _sampled("best_of", s, n, expr)
    judges = [branch.fork(1)[0] for branch in branches]
    results = await _values("best_of", "by", s, [partial(by, judge) for judge in judges])
    values = await _values("best_of", "by", s, [partial(_read, result) for result in results])
    scores = [_score(value) for value in values]
    await value_of(branches.adopt(_index_of_best(scores)))
    return scores


@overload
def vote(s: ProgramState, n: int, expr: str | Expr, name: str) -> Any: ...
@overload
def vote(s: AsyncState, n: int, expr: str | Expr, name: str) -> Coroutine[Any, Any, Any]: ...
def vote(s: ProgramState | AsyncState, n: int, expr: str | Expr, name: str) -> Any:
    """Appends `expr` in `n` branches and continues with one whose variable `name` has the most frequent value. Returns
    that value. In an async program it is awaited.

    This is self-consistency (Wang et al. 2022, arXiv:2203.11171).

    >>> vote(s, 5, "Think: " + gen("why") + " Answer: " + gen("answer", type=int), "answer")     # doctest: +SKIP
    42
    """
    return _run(s, _vote(s, n, expr, name))


async def _vote(s: ProgramState | AsyncState, n: int, expr: str | Expr, name: str) -> Any:
    branches = _sampled("vote", s, n, expr)
    texts = [await value_of(branch.text_of(name)) for branch in branches]
    await value_of(branches.adopt(_index_of_most_frequent(texts)))
    return await value_of(s[name])


@overload
def map(s: ProgramState, items: Iterable[Item], write: Callable[[ProgramState, Item], object]) -> ProgramStateGroup: ...
@overload
def map(
    s: AsyncState, items: Iterable[Item], write: Callable[[AsyncState, Item], object]
) -> Coroutine[Any, Any, AsyncStateGroup]: ...
def map(
    s: ProgramState | AsyncState, items: Iterable[Item], write: Callable[[Any, Item], object]
) -> ProgramStateGroup | Coroutine[Any, Any, AsyncStateGroup]:
    """Forks one branch per item, calls `write(branch, item)` for each and joins them. Returns the branches.

    New variables of the branches become lists in `s`, in the order of the items. In an async program it is awaited, and
    `write` may be `async def`.

    >>> plait.map(s, chapters, lambda b, text: b.user(text) or b.assistant(gen("summary")))      # doctest: +SKIP
    """
    _check_state("map", s)
    _check_function("map", "write", write)
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InputError(f"map takes a list of items, one per branch, not {items!r:.80}")
    item_list: Sequence[Item] = list(items)
    if not item_list:
        raise InputError("map got no items; check for an empty list before the call")
    return _run(s, _map(s, item_list, write))


async def _map(s: ProgramState | AsyncState, items: Sequence[Item], write: Callable[[Any, Item], object]) -> Any:
    branches: Any = s.fork(len(items))
    await _values("map", "write", s, [partial(write, *pair) for pair in zip(branches, items, strict=True)])
    await value_of(branches.join())
    return branches


def _run(s: object, body: Coroutine[Any, Any, R]) -> R | Coroutine[Any, Any, R]:
    """Returns the result of a pattern, or for an async state what the program awaits."""
    return body if isinstance(s, AsyncState) else finish(body)


def _read(result: Any) -> Any:
    """Returns a score, or what the function returns that `by` returned."""
    return result() if callable(result) else result


async def _values(where: str, name: str, s: object, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the values of calls of the function `name`. In an async program those that are awaitable are awaited at
    the same time, and after an error none of them runs on."""
    if not isinstance(s, AsyncState):
        return [_not_awaitable(where, name, call()) for call in calls]
    values = [call() for call in calls]
    tasks = {i: asyncio.ensure_future(value) for i, value in enumerate(values) if inspect.isawaitable(value)}
    if not tasks:
        return list(values)
    try:
        awaited = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return [awaited.get(i, value) for i, value in enumerate(values)]


def _sampled(where: str, s: ProgramState | AsyncState, n: int, expr: str | Expr) -> Any:
    """Returns the group of `n` branches with `expr` appended."""
    _check_state(where, s)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"{where}: the number of branches must be at least 1, not {n!r:.40}")
    branches: Any = s.fork(n)
    branches += expr
    return branches


def _index_of_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _index_of_most_frequent(texts: Sequence[str]) -> int:
    stripped = [text.strip() for text in texts]
    return stripped.index(Counter(stripped).most_common(1)[0][0])


def _check_state(where: str, s: object) -> None:
    if not isinstance(s, ProgramState | AsyncState):
        raise InputError(f"{where} takes the state of a program, not {s!r:.80}")


def _not_awaitable(where: str, name: str, result: Any) -> Any:
    """Returns what a function of a plain program returned. Raises InputError if that must be awaited."""
    if isinstance(result, Coroutine):
        result.close()  # nothing will await it
        raise InputError(f"{where}: {name} is async def, which only the state of an async def program can await")
    return result


def _check_function(where: str, name: str, value: object) -> None:
    if not callable(value):
        raise InputError(f"{where}: {name} must be a function, not {value!r:.80}")


def _score(value: Any) -> float:
    with contextlib.suppress(TypeError):
        if not isinstance(value, str | bytes | bytearray) and not math.isnan(score := float(value)):
            return score  # NaN is refused: no comparison with it is true, so the first branch would always win
    raise InputError(f"best_of: by must return a number for each branch, not {value!r:.80}; convert text with int(...)")
