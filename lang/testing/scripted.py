"""`Scripted(answers)`: a backend that answers from a script and is strict about it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from plait.lang.backends.default_backend import Backend, default_backend, set_default_backend
from plait.lang.testing.script_answers import ScriptError, describe_call, make_outcome
from plait.lang.testing.text_client import Asked, Outcome, TextClient, byte_tokenizer
from plait.runtime.errors import CallFailed, InputError
from plait.runtime.tokenizer.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CONTROL = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Always:
    """See `always`."""

    value: Any


def always(value: Any) -> Always:
    """The answer of every call of a variable, however many there are; at least one."""
    return Always(value)


class Scripted(TextClient):
    """A backend that answers from `answers`, and needs no model. One of

    - a dict: for each variable one answer, a list with one for each of its calls, a function of `Asked`, or
      `always(answer)`; the key None is for calls without a name;
    - a list: one answer for each call, in the program's order;
    - a function: `answer(asked)` for every call.

    An answer is text; or for a typed gen the object; for a select one of its choices, or a dict of their scores; for
    tools `call(name, ...)`; `Answer(...)` to say more; or a CallFailed, with which the call fails. What the call could
    not have given (its constraint, choices, stop strings, max_tokens) is a ScriptError, and so are a call without an
    answer and, at the end of a `with` block, an answer without a call.

    In a `with` block it is the default backend. `asked` holds every call so far. `chat_template` is Jinja source, None
    for a model without turns.

    >>> with Scripted({"answer": "Blue."}) as script:                     # doctest: +SKIP
    ...     assert ask.run("Which colour?")["answer"] == "Blue."
    """

    def __init__(self, answers: Any, *, chat_template: str | None = CHATML) -> None:
        template = None if chat_template is None else ChatTemplate(chat_template, "", "<|im_end|>")
        super().__init__(byte_tokenizer(template, _CONTROL), "scripted")
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        self._errors: list[ScriptError] = []
        self._function, self._remaining, self._reusable = _parse_script(answers)
        self._previous_backend: Backend | None = None

    @property
    def client(self) -> Scripted:
        return self

    def answer(self, asked: Asked) -> Outcome:
        if asked.choices is None and asked.params.max_tokens == 0:  # only computes its prompt
            return Outcome("", "length")
        with self._lock:
            self.asked.append(asked)
        try:
            return make_outcome(asked, self._answer_for(asked))
        except ScriptError as error:
            self._errors.append(error)
            raise

    def check(self) -> None:
        """Raises ScriptError for the first call that had no fitting answer, else for answers that no call took."""
        if self._errors:
            raise ScriptError(str(self._errors[0]))
        left = [f"{len(given)} of {key}" for key, given in self._remaining.items() if given]
        left += [f"those of {key}" for key, each in self._reusable.items() if isinstance(each, _NeverUsed)]
        if left:
            raise ScriptError(f"answers that no call took: {', '.join(left)}; the calls were {self._calls()}")

    def __enter__(self) -> Scripted:
        self._previous_backend = default_backend()
        set_default_backend(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        set_default_backend(self._previous_backend)
        if kind is None:
            self.check()

    def _answer_for(self, asked: Asked) -> Any:
        """The answer for this call; a function's own exception becomes a ScriptError."""
        with self._lock:
            given = self._next(asked)
        if callable(given) and not isinstance(given, type):
            try:
                return given(asked)
            except (ScriptError, CallFailed):
                raise
            except Exception as error:
                raise ScriptError(f"the script's function failed for {describe_call(asked)}: {error!r}") from error
        return given

    def _next(self, asked: Asked) -> Any:
        if self._function is not None:
            return self._function
        key = _ORDER if _ORDER in self._remaining else _key(asked.name)
        if key in self._reusable:
            each = self._reusable[key]
            value = self._reusable[key] = each.value if isinstance(each, _NeverUsed) else each
            return value
        if self._remaining.get(key):
            return self._remaining[key].pop(0)
        had = (
            f"all of its answers are used: {self._calls()}"
            if key in self._remaining
            else f"it has those of {self._names()}"
        )
        raise ScriptError(f"the script has no answer for {describe_call(asked)}, call {len(self.asked)}; {had}")

    def _names(self) -> str:
        return ", ".join([*self._remaining, *self._reusable]) or "nothing"

    def _calls(self) -> str:
        return ", ".join(describe_call(asked) for asked in self.asked) or "none"


_ORDER = "the list"


@dataclass(frozen=True)
class _NeverUsed:
    """An answer for every call that no call took yet."""

    value: Any


def _key(name: str | None) -> str:
    return repr(name)


def _parse_script(
    answers: Any,
) -> tuple[Callable[[Asked], Any] | None, dict[str, list[Any]], dict[str, Any]]:
    """(a function for all calls, answers used once by variable, answers used every time by variable)."""
    if isinstance(answers, Mapping):
        left: dict[str, list[Any]] = {}
        every: dict[str, Any] = {}
        for name, given in answers.items():
            if name is not None and not isinstance(name, str):
                raise InputError(f"Scripted: answers go by the names of variables, not {name!r:.80}")
            if isinstance(given, Always):
                every[_key(name)] = _NeverUsed(given.value)
            elif callable(given) and not isinstance(given, type):
                every[_key(name)] = _NeverUsed(given)
            else:
                left[_key(name)] = list(given) if isinstance(given, list) else [given]
        return None, left, every
    if isinstance(answers, Sequence) and not isinstance(answers, str):
        return None, {_ORDER: list(answers)}, {}
    if callable(answers):
        return answers, {}, {}
    raise InputError(f"Scripted takes a dict, a list or a function, not {answers!r:.80}")
