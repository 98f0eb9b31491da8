"""`Scripted(answers)`: a backend for tests that answers from a script, and fails if script and program do not match."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.lang.backends.default_backend import BackendOfBlock
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
    """An answer for every call of a variable; see `always`."""

    value: Any


def always(value: Any) -> Always:
    """Returns an answer that every call of a variable gets. At least one call must use it."""
    return Always(value)


class Scripted(BackendOfBlock, TextClient):
    """A backend without a model, which answers from `answers`:

    - a dict: for each variable one answer, a list with one answer per call, a function of `Asked`, or
      `always(answer)`; the key None is for calls without a name;
    - a list: one answer per call, in the order of the calls;
    - a function: `answer(asked)` for every call.

    An answer is text; for a typed gen the object; for a select one of its choices, or a dict of scores; for tools
    `call(name, ...)`; `Answer(...)` to set the finish reason or token count; or a CallFailed, which fails the call. An
    answer that the call cannot produce (because of its constraint, choices, stop strings or max_tokens) raises
    ScriptError. So do a call without an answer and, at the end of a `with` block, an answer without a call.

    Inside a `with` block it is the default backend. `asked` is the list of all calls so far. `chat_template` is a Jinja
    template, or None for a model without turns.

    >>> with Scripted({"answer": "Blue."}) as script:                     # doctest: +SKIP
    ...     assert ask.run("Which colour?")["answer"] == "Blue."
    """

    def __init__(self, answers: Any, *, chat_template: str | None = CHATML) -> None:
        template = None if chat_template is None else ChatTemplate(chat_template, "", "<|im_end|>")
        super().__init__(byte_tokenizer(template, _CONTROL), "scripted")
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        self._errors: list[ScriptError] = []
        self._function, self._answers = _parse_script(answers)

    def answer(self, asked: Asked) -> Outcome:
        if asked.choices is None and asked.params.max_tokens == 0:  # the call only computes its prompt
            return Outcome("", "length")
        with self._lock:
            self.asked.append(asked)
        try:
            return make_outcome(asked, self._answer_for(asked))
        except ScriptError as error:
            self._errors.append(error)
            raise

    def check(self) -> None:
        """Raises ScriptError for the first call without a valid answer, otherwise for answers that no call used."""
        if self._errors:
            raise ScriptError(str(self._errors[0]))
        unused = [f"{len(left)} of {key}" for key, left in self._answers.items() if isinstance(left, list) and left]
        reusable = [(key, answer) for key, answer in self._answers.items() if isinstance(answer, _Reusable)]
        unused += [f"those of {key}" for key, answer in reusable if not answer.is_used]
        if unused:
            raise ScriptError(f"answers that no call used: {', '.join(unused)}; the calls were {self._calls()}")

    def _end_block(self, succeeded: bool) -> None:
        if succeeded:
            self.check()

    def _answer_for(self, asked: Asked) -> Any:
        """Returns the answer for a call. An exception of the script's function becomes a ScriptError."""
        with self._lock:
            answer = self._next(asked)
        if callable(answer) and not isinstance(answer, type):
            try:
                return answer(asked)
            except (ScriptError, CallFailed):
                raise
            except Exception as error:
                raise ScriptError(f"the script's function failed for {describe_call(asked)}: {error!r}") from error
        return answer

    def _next(self, asked: Asked) -> Any:
        if self._function is not None:
            return self._function
        key = _ORDER if _ORDER in self._answers else _key(asked.name)
        answers = self._answers.get(key)
        if isinstance(answers, _Reusable):
            answers.is_used = True
            return answers.value
        if answers:
            return answers.pop(0)
        known = ", ".join(self._answers) or "nothing"
        reason = f"it has answers for {known}" if answers is None else f"all of its answers are used: {self._calls()}"
        raise ScriptError(f"the script has no answer for {describe_call(asked)}, call {len(self.asked)}; {reason}")

    def _calls(self) -> str:
        return ", ".join(describe_call(asked) for asked in self.asked) or "none"


_ORDER = "the list"


@dataclass
class _Reusable:
    """An answer that all calls of a variable get."""

    value: Any
    is_used: bool = False


def _key(name: str | None) -> str:
    return repr(name)


def _parse_script(answers: Any) -> tuple[Callable[[Asked], Any] | None, dict[str, list[Any] | _Reusable]]:
    """Returns the function for all calls, or else the answers by variable."""
    if isinstance(answers, Mapping):
        by_variable: dict[str, list[Any] | _Reusable] = {}
        for name, answer in answers.items():
            if name is not None and not isinstance(name, str):
                raise InputError(f"Scripted: the keys of answers are names of variables, not {name!r:.80}")
            if isinstance(answer, Always) or (callable(answer) and not isinstance(answer, type)):
                by_variable[_key(name)] = _Reusable(answer.value if isinstance(answer, Always) else answer)
            else:
                by_variable[_key(name)] = list(answer) if isinstance(answer, list) else [answer]
        return None, by_variable
    if isinstance(answers, Sequence) and not isinstance(answers, str):
        return None, {_ORDER: list(answers)}
    if callable(answers):
        return answers, {}
    raise InputError(f"Scripted takes a dict, a list or a function, not {answers!r:.80}")
