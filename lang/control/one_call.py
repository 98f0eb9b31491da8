"""`extract`, `classify` and `ask`: one call of a model, or one for each text of a list, without a program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, Unpack, cast, overload

from plait.constrained.specs import JsonSchema
from plait.lang.adapters import adapter as adapter_block
from plait.lang.backends.default_backend import Backend
from plait.lang.budget import Budget
from plait.lang.core.expressions import Select
from plait.lang.core.primitives import gen
from plait.lang.core.roles import assistant, system, user
from plait.lang.core.select import select
from plait.lang.gen_keywords import RunKeywords
from plait.lang.program import Program, function
from plait.lang.states.state import ProgramState
from plait.lang.typed.schema_rewriting import schema_for_prompt
from plait.runtime.errors import InputError

T = TypeVar("T")
Labels = list[str] | tuple[str, ...] | Mapping[str, str]
DEFAULTS = {"temperature": 0, "max_tokens": 512}


class OneCallKeywords(RunKeywords, total=False):
    """The keywords that `extract`, `classify` and `ask` share, with the sampling keywords of `run`."""

    instructions: str | None
    backend: Backend | None
    adapter: str | None
    budget: Budget | None


class ExtractKeywords(OneCallKeywords, total=False):
    """The keywords of `extract`."""

    retries: int | None


@overload
def extract(type: type[T], text: str, **options: Unpack[ExtractKeywords]) -> T: ...
@overload
def extract(type: type[T], text: list[str], **options: Unpack[ExtractKeywords]) -> list[T]: ...
@overload
def extract(type: object, text: str | list[str], **options: Unpack[ExtractKeywords]) -> Any: ...
def extract(type: Any, text: str | list[str], **options: Any) -> Any:
    """Returns a value of `type` with the facts of `text`; of a list of texts the list of values, computed in parallel.

    The types are those of `gen(type=...)`: a Pydantic model, dataclass, TypedDict, Literal, int, list[...] and so on.
    The text of the model is constrained to the type, so the value is always valid. If its fields have descriptions
    (`Field(description=...)`), the model reads the type's JSON schema.

    - `instructions`: the task, which follows the text, in place of "Extract the facts from the text above.".
    - `retries`: asks again if a validator of the type rejects the value, as in `gen`.
    - `backend`, `budget` and the sampling keywords as in `run`, directly or as `sampling={...}`; `temperature` is 0 and
      `max_tokens` 512 unless they are given. `adapter`: the name of the adapter that computes it.

    Raises what a program with this gen raises: InputError for a wrong type or keyword, UnreadableValue if a validator
    rejects the value, ProgramError if a call fails; of a list the error of the first text that failed.

    >>> plait.extract(Person, "Ada Lovelace was born in 1815.")                      # doctest: +SKIP
    Person(name='Ada Lovelace', born=1815)
    """
    if type is None:  # a gen of no type is text
        raise InputError("extract: type takes a type, such as int or a dataclass, not None; plait.ask returns text")
    value = gen("value", type=type, retries=options.pop("retries", None))
    schema = str(value.constraint.schema) if isinstance(value.constraint, JsonSchema) else ""
    task = _instructions(options, f"Extract the facts from the text above{' as JSON' * bool(schema)}.")
    if '"description":"' in schema:
        task += f"\nThe JSON schema: {json.dumps(schema_for_prompt(json.loads(schema)))}"

    @function
    def extract(s: ProgramState, text: str) -> None:
        s += user(f"{text}\n\n{task}") + assistant(value)

    return _run(extract, text, "value", options)


@overload
def classify(text: str, labels: type[T], **options: Unpack[OneCallKeywords]) -> T: ...
@overload
def classify(text: list[str], labels: type[T], **options: Unpack[OneCallKeywords]) -> list[T]: ...
@overload
def classify(text: str, labels: Labels, **options: Unpack[OneCallKeywords]) -> str: ...
@overload
def classify(text: list[str], labels: Labels, **options: Unpack[OneCallKeywords]) -> list[str]: ...
@overload
def classify(text: str | list[str], labels: object, **options: Unpack[OneCallKeywords]) -> Any: ...
def classify(text: str | list[str], labels: Any, **options: Any) -> Any:
    """Returns the label that fits `text` best; of a list of texts the list of labels, computed in parallel.

    `labels`: a list of texts; a dict of texts with a description of each, which the model reads; an Enum, a Literal or
    bool, whose value is returned. Nothing is sampled: each label is scored, as in `select`.

    The keywords are those of `extract` without `retries`. `instructions` are "Which label fits the text?" by default;
    the labels are listed after them. Raises InputError for wrong labels, ProgramError if a call fails.

    >>> plait.classify("My parcel never came.", ["billing", "delivery"])            # doctest: +SKIP
    'delivery'
    """
    described = labels if isinstance(labels, Mapping) else {}
    if not all(isinstance(description, str) for description in described.values()):
        raise InputError(f"classify: a dict of labels has a text that describes each, not {described!r:.80}")
    label = select("label", [*labels] if isinstance(labels, Mapping) else labels)
    names = cast(Select, label).choices
    listed = [f"- {name}: {described[name]}" if described else f"- {name}" for name in names]
    task = "\n".join([_instructions(options, "Which label fits the text?"), *listed])

    @function
    def classify(s: ProgramState, text: str) -> None:
        s += user(f"{task}\n\nText: {text}") + assistant("Label: " + label)

    return _run(classify, text, "label", options)


@overload
def ask(text: str, **options: Unpack[OneCallKeywords]) -> str: ...
@overload
def ask(text: list[str], **options: Unpack[OneCallKeywords]) -> list[str]: ...
def ask(text: str | list[str], **options: Any) -> Any:
    """Returns the model's answer to `text` as text; of a list the list of answers, computed in parallel.

    The keywords are those of `extract` without `retries`. `instructions`: the text of a system turn. An answer that
    `max_tokens` cuts off is returned as far as it is. Raises ProgramError if the call fails.

    >>> plait.ask("Why is the sky blue?", instructions="Answer in one sentence.")    # doctest: +SKIP
    'The sky is blue because air scatters blue light more than red light.'
    """
    instructions = _instructions(options, "")

    @function
    def ask(s: ProgramState, text: str) -> None:
        if instructions:
            s += system(instructions)
        s += user(text) + assistant(gen("answer"))

    return _run(ask, text, "answer", options)


def _instructions(options: dict[str, Any], default: str) -> str:
    """Takes the instructions out of the keywords."""
    given = options.pop("instructions", None)
    if given is not None and not isinstance(given, str):
        raise InputError(f"instructions must be text, not {given!r:.80}")
    return default if given is None else given


def _run(program: Program[[str]], text: object, name: str, options: dict[str, Any]) -> Any:
    """Runs the program for a text, or for each text of a list. Returns the value or the list of values."""
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
        raise InputError(f"{program.name}: it takes a text or a list of texts, not {text!r:.80}")
    if "stream" in options:
        raise InputError(f"{program.name}: it returns the whole value; to stream, write a program and run(stream=True)")
    adapter, sampling = options.pop("adapter", None), options.get("sampling") or {}
    if isinstance(sampling, Mapping):  # the program refuses another value
        known = {"max_tokens" if key == "max_new_tokens" else key for key in (*options, *sampling)}
        options["sampling"] = {key: value for key, value in DEFAULTS.items() if key not in known} | {**sampling}
    with nullcontext() if adapter is None else adapter_block(adapter):
        if isinstance(text, str):
            return program.run(text, **options)[name]
        return [state[name] for state in program.run_batch([{"text": item} for item in texts], **options)]
