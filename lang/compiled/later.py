"""What a step will give, where a strand holds its answers: read while a body is compiled, it is not known yet.

Knows: results and their values. Must not know: strands, states, who runs the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from plait.lang.answers import Readable
from plait.lang.compiled.unknown import Env, NotKnown, Result

if TYPE_CHECKING:
    from plait.lang.compiled.tape import Tape
    from plait.lang.typed.form import Form


class Later(Readable):
    """What a step will give. `result.sample` None and n above 1: a list."""

    def __init__(self, tape: Tape, strand: int, base: NotKnown, result: Result, n: int = 1) -> None:
        self.base, self.result, self.n = base, result, n
        self._tape, self._strand = tape, strand

    @classmethod
    def of_call(
        cls, tape: Tape, strand: int, node: int, name: str | None, n: int = 1, form: Form | None = None
    ) -> Later:
        result = Result(node, name)
        return cls(tape, strand, not_known(tape, result, form), result, n)

    @property
    def form(self) -> Form | None:
        return self.base._form

    def value(self) -> Any:
        self._tape.read.add(self._strand)
        if self.n == 1:
            return self.base
        samples = [Result(self.result.node, self.result.name, index) for index in range(self.n)]
        return [not_known(self._tape, each, self.form) for each in samples]

    def whole(self) -> NotKnown:
        """Its text, which the state's goes on with."""
        self._tape.read.add(self._strand)
        return (
            self.base
            if self.form is None
            else self.base._derived(f"s.text_of({self.result.name!r})", self._text, is_plain=True)
        )

    def _text(self, env: Env) -> str:
        return env.result(self.result.node, self.result.name).text()

    def text(self) -> str:
        return str(self.base)

    def meta(self) -> Any:
        self._tape.read.add(self._strand)
        node, name = self.result.node, self.result.name

        def of(sample: int | None) -> NotKnown:
            def evaluate(env: Env) -> Any:
                found = env.result(node, name).meta()
                return found if sample is None else found[sample]

            return self.base._derived(f"s.get_meta_info({name!r})", evaluate)

        return of(None) if self.n == 1 else [of(index) for index in range(self.n)]

    def iter_text(self) -> Iterator[str]:
        yield self.text()


class SetValue(Readable):
    """A value that the body set itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value

    def text(self) -> str:
        return str(self._value)


def not_known(tape: Tape, result: Result, form: Form | None = None) -> NotKnown:
    name = "gen(...)" if result.name is None else f"s[{result.name!r}]"
    said = name if result.sample is None else f"{name}[{result.sample}]"

    def evaluate(env: Env) -> Any:
        found = env.result(result.node, result.name).value()
        return found if result.sample is None else found[result.sample]

    return NotKnown(tape.marks, said, frozenset([result]), evaluate, (), form, form is None or form.said == "str")
