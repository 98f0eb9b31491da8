"""`select`, and the names of SGLang for what plait does not have. Each checks its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, get_origin, overload

from plait.constrained.specs import Choices
from plait.lang.adapters import with_adapter
from plait.lang.argument_checks import call_label, checked_choices
from plait.lang.choices import ChoicesMethod, method_name, token_length_normalized
from plait.lang.core.expressions import Expr, Select
from plait.lang.errors import unknown_keyword
from plait.lang.sampling_options import make_options
from plait.lang.typed.value_format import ValueFormat, value_format_of
from plait.runtime.errors import InputError

MAX_SELECT_CHOICES = 1024  # each choice is scored as a separate sequence; a gen with choices may have more

_SpecialForm: TypeAlias = object  # Literal[...] and X | Y, which are no `type[T]` to type checkers


@overload
def select(
    name: str | None,
    choices: Iterable[str],
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
    *,
    timeout: float | None = None,
    exact: bool | None = None,
    seed: int | None = None,
    adapter: str | None = None,
) -> Expr: ...
@overload
def select(
    name: str | None = None,
    choices: type | _SpecialForm | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
    *,
    timeout: float | None = None,
    exact: bool | None = None,
    seed: int | None = None,
    adapter: str | None = None,
) -> Expr: ...
def select(
    name: str | None = None,
    choices: Iterable[str] | type | _SpecialForm | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
    *,
    timeout: float | None = None,
    exact: bool | None = None,
    seed: int | None = None,
    adapter: str | None = None,
    **unknown: object,
) -> Expr:
    """The most likely one of `choices`, stored as variable `name` and appended to the text.

    `choices` is a list of texts, or an Enum, a Literal or bool: then the value is one of its values, and the texts are
    those of `gen(type=...)`. Nothing is sampled: `choices_method` scores every choice, and the best one is taken.

    - `exact=True`: one of the choices is drawn by the model's own distribution over them. The probability of a choice
      is the product of the probabilities of its tokens, divided by the sum of these products over all choices. `seed`
      as in `gen`.
    - `timeout`: in seconds.
    - `adapter`: as in `gen`.

    A choice is tokenized together with the text before it. So a space may be written at the end of the text or at the
    start of each choice with the same result, unless a fork or another call comes between the two.

    Raises InputError for an empty list, equal choices, or a temperature above 0.

    >>> s += "The capital of France is " + select("city", ["Paris", "Rome"])          # doctest: +SKIP
    """
    where = call_label("select", name)
    for keyword in unknown:
        raise unknown_keyword(
            where, keyword, ("name", "choices", "temperature", "choices_method", "timeout", "exact", "seed", "adapter")
        )
    if choices is None:
        raise InputError(f"{where} needs choices: a list of texts, an Enum or a Literal")
    checked = make_options(where, temperature=temperature, timeout=timeout)
    if checked.fields.get("temperature"):
        raise InputError(
            f"{where}: select scores its choices and does not sample; to sample one, write "
            f"gen({name!r}, choices=[...], temperature={temperature!r})"
        )
    texts, value_format = _scored_choices(where, choices)
    method, timeout_s = method_name(choices_method), checked.fields.get("timeout_s")
    if not exact:
        if seed is not None:
            raise InputError(f"{where}: seed has no effect without exact=True, since nothing is drawn")
        return with_adapter(where, Select(name, texts, method, timeout_s, value_format), adapter)
    if method != token_length_normalized.name:
        raise InputError(f"{where}: exact draws a choice by its probability, so choices_method has no effect")
    drawn = Select(name, texts, "exact", timeout_s, value_format, make_options(where, seed=seed))
    return with_adapter(where, drawn, adapter)


def image(path: object, *_: object, **__: object) -> Expr:
    """Exists in SGLang. Always raises InputError, since the models that plait runs read text only."""
    raise InputError("image(...) is not supported: the models that plait runs read text only")


def video(path: object, *_: object, **__: object) -> Expr:
    """Exists in SGLang. Always raises InputError, like `image`."""
    raise InputError("video(...) is not supported: the models that plait runs read text only")


def _scored_choices(where: str, choices: object) -> tuple[tuple[str, ...], ValueFormat | None]:
    """Returns the texts of a select and, if `choices` is a type, the format that converts them to its values."""
    if not isinstance(choices, type) and get_origin(choices) is not Literal:
        return checked_choices(where, choices, MAX_SELECT_CHOICES).choices, None
    value_format = value_format_of(where, choices)
    if not isinstance(value_format.spec, Choices):
        raise InputError(
            f"{where}: choices may be an Enum, a Literal or bool; {value_format.type_name} has more values"
        )
    return checked_choices(where, value_format.spec.choices, MAX_SELECT_CHOICES).choices, value_format
