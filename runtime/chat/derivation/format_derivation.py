"""Splits the renderings of probe calls into the texts of a `CallFormat`."""

from __future__ import annotations

import functools
import itertools
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from plait.constrained.specs import PythonForm
from plait.runtime.chat.derivation.template_probe import NAMES, TEXT, ProbeCall, TemplateProbe, call_message
from plait.runtime.chat.formats.call_format import (
    ArgumentsForm,
    CallFormat,
    ElementArguments,
    IdSource,
    JsonArguments,
    KeywordArguments,
    NotationArguments,
    element_text,
    formed_ids,
)

KEYS, VALUES = ("qz_k1", "qz_k2"), ("qz_v1", "qz_v2")
# Values of each JSON type, to see how elements name types and write scalars.
_TYPED = {
    "string": "qz_v1",
    "integer": 17,
    "number": 2.5,
    "boolean": True,
    "null": None,
    "array": [8],
    "object": {"q": 9},
}
_NUMBER = re.compile(r"(?<![A-Za-z0-9])[0-9]+(?![A-Za-z0-9])")
_LETTERS = string.ascii_letters
_DECODER = json.JSONDecoder()


def probe_ids(id_form: str, names: Sequence[str]) -> list[str]:
    """Returns ids of probe calls that a template accepts, which takes ids of this form."""
    return formed_ids(id_form, names) or [f"qzid{index:05}" for index in range(len(names))]


class _Arguments(NamedTuple):
    """The arguments of a call within a rendering, text[start:end], and their form."""

    start: int
    end: int
    form: ArgumentsForm


class Repeated(NamedTuple):
    """The texts around repeated items: `begin` `head` item `tail` `separator` `head` item `tail` `end`."""

    begin: str
    head: str
    tail: str
    separator: str
    end: str


def split_repeated(first: str, between: str, last: str) -> Repeated:
    """Returns the texts around items, given what stands before the first one, between two, and behind the last.

    Marks such as <call> and [CALL] are not divided.

    >>> split_repeated('[{"name": ', '}, {"name": ', '}]')
    Repeated(begin='[', head='{"name": ', tail='}', separator=', ', end=']')
    >>> split_repeated("<calls><call>", "</call><call>", "</call></calls>")
    Repeated(begin='<calls>', head='<call>', tail='</call>', separator='', end='</calls>')
    """
    tail = common_prefix(between, last)
    tail = tail[: len(tail) - num_of_open_mark(tail, between)]
    head = _common_suffix(first, between[len(tail) :])
    head = head[_num_of_closed_mark(head, first) :]
    separator = between[len(tail) : len(between) - len(head)]
    return Repeated(first[: len(first) - len(head)], head, tail, separator, last[len(tail) :])


def common_prefix(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _common_suffix(a: str, b: str) -> str:
    return common_prefix(a[::-1], b[::-1])[::-1]


_TAG = re.compile(r"<[^<>]*(?:>|$)|\[[A-Z_/]+(?:\]|$)")


def num_of_open_mark(text: str, whole: str) -> int:
    """How many characters at the end of `text`, the beginning of `whole`, belong to a mark that goes on behind it."""
    cut = len(text)
    return next((cut - m.start() for m in _TAG.finditer(whole) if m.start() < cut < m.end()), 0)


def _num_of_closed_mark(text: str, whole: str) -> int:
    """How many characters at the start of `text`, the end of `whole`, belong to a mark that begins before it."""
    cut = len(whole) - len(text)
    return next((m.end() - cut for m in _TAG.finditer(whole) if m.start() < cut < m.end()), 0)


class Derivation:
    """Derives a format for one way to give arguments (as text or as an object) and one form of ids."""

    def __init__(self, probe: TemplateProbe, takes_text: bool, id_form: str, after_text: bool) -> None:
        self._probe, self._takes_text, self._id_form, self._after_text = probe, takes_text, id_form, after_text
        self._ids = probe_ids(id_form, NAMES)

    def derive(self) -> CallFormat | None:
        """Returns the format; None if the template does not write calls given so, or in an unknown form."""
        arguments = dict(zip(KEYS, VALUES, strict=True))
        one = self._probe.calls([self._call(0, arguments)])
        if one is None or _find_arguments(one, arguments) is None:
            return None
        text, start = self._with_content(one, arguments)
        placed = _find_arguments(text, arguments)
        if placed is None:
            return None
        first = self._masked(text[start : placed.start]).lstrip()
        last = self._masked(self._without_end_of_turn(text[placed.end :]))
        common = CallFormat(
            first,
            last,
            placed.form,
            lead=self._lead(one, first),
            takes_text=self._takes_text,
            id_form=self._id_form if "{name}" in self._id_form else "",
            is_single=True,
            has_long_opener=bool(_first_mark(first)) and _first_mark(first) in self._plain_end,
        )
        two = self._probe.calls([self._call(0, arguments), self._call(1, arguments)])
        between = None if two is None else self._between(two, arguments)
        if between is not None:
            common = self._of_several(common, first, between, last)
        return _checked(self._with_details(common))

    def _of_several(self, common: CallFormat, first: str, between: str, last: str) -> CallFormat:
        """Returns the format of a template that writes several calls."""
        first, between, last, counts = _mask_counter(first, between, last)
        parts = split_repeated(first, between, last)
        if not parts.begin and _TAG.fullmatch(parts.end):  # a mark that ends a turn with calls
            parts = parts._replace(end="")
        has_id = "{id}" in parts.head + parts.tail
        source: IdSource = (
            "counter" if counts is not None or (has_id and common.id_form) else "client" if has_id else ""
        )
        return replace(
            common,
            begin=parts.begin,
            head=parts.head,
            tail=parts.tail,
            separator=parts.separator,
            end=parts.end,
            id_source=source,
            first_number=counts,
            counts_on=counts is not None and self._counts_on(parts.head, counts),
            id_pattern={"": "", "counter": "[0-9]{1,6}", "client": "[a-zA-Z0-9]{9}"}[source],
            is_single=False,
        )

    def _counts_on(self, head: str, first: int) -> bool:
        """Whether the number of a call goes on from those of an earlier answer."""
        if "{name}" in self._id_form:
            return True  # it stands in the ids, which are made so
        answers = [call_message(self._call(index, {KEYS[0]: VALUES[0]})) for index in range(2)]
        turns = [("user", "u", {}), ("assistant", "", answers[0]), ("tool", "r", {"tool_call_id": self._ids[0]})]
        turns += [("user", "v", {}), ("assistant", "", answers[1])]
        text = self._probe.render([{"role": role, "content": text, **more} for role, text, more in turns]) or ""
        pattern = re.escape(head).replace(re.escape("{name}"), NAMES[1]).replace(re.escape("{id}"), "([0-9]+)")
        return any(int(number) > first for number in re.findall(pattern, text))

    def _call(self, index: int, arguments: Mapping[str, Any]) -> ProbeCall:
        given = json.dumps(arguments) if self._takes_text else arguments
        return self._ids[index], NAMES[index], given

    def _masked(self, text: str) -> str:
        """Returns text with the names and ids of calls as {name} and {id}."""
        if "{name}" not in self._id_form:
            for call_id in self._ids:
                text = text.replace(call_id, "{id}")
        for name in NAMES:
            text = text.replace(name, "{name}")
        return text

    def _with_content(self, one: str, arguments: Mapping[str, Any]) -> tuple[str, int]:
        """Returns (rendering of one call, where its marks begin): behind a text before the call, if the template
        writes one, else behind what it writes before any answer."""
        with_text = self._probe.calls([self._call(0, arguments)], TEXT)
        plain = self._probe.answer({"content": TEXT})
        if self._after_text and with_text is not None and TEXT in with_text:
            after = with_text.index(TEXT) + len(TEXT)
            if NAMES[0] not in with_text[:after]:
                return with_text, after
        headers = [plain.partition(TEXT)[0]] if plain is not None and TEXT in plain else []
        prompt = self._probe.generation_prompt()
        headers += [prompt] if prompt is not None else []
        for header in headers:
            if one.startswith(header):
                return one, len(header)
        shared = max((common_prefix(one, header) for header in headers), key=len, default="")
        return one, len(shared) - num_of_open_mark(shared, one)

    def _without_end_of_turn(self, text: str) -> str:
        end = self._plain_end
        for ending in (end, end.strip()):
            if ending.strip() and ending in text:
                return text[: text.index(ending)]
        shared = _common_suffix(text, end)
        return text[: len(text) - len(shared) + _num_of_closed_mark(shared, text)]

    @functools.cached_property
    def _plain_end(self) -> str:
        """What the template writes behind an answer without calls."""
        plain = self._probe.answer({"content": TEXT})
        return plain.partition(TEXT)[2] if plain is not None and TEXT in plain else ""

    def _lead(self, one: str, first: str) -> str:
        """The white space between the prompt and the first call."""
        prompt = self._probe.generation_prompt()
        rest = one[len(prompt) :] if prompt is not None and one.startswith(prompt) else ""
        is_after = self._masked(rest).lstrip().startswith(first)
        return rest[: len(rest) - len(rest.lstrip())] if is_after else ""

    def _between(self, two: str, arguments: Mapping[str, Any]) -> str | None:
        first = _find_arguments(two, arguments)
        if first is None:
            return None
        second = _find_arguments(two[first.end :], arguments)
        return None if second is None else self._masked(two[first.end : first.end + second.start])

    def _with_details(self, derived: CallFormat) -> CallFormat:
        """Adds what one text as an argument does not show."""
        form = derived.arguments
        if isinstance(form, NotationArguments):
            text = self._probe.calls([self._call(0, {KEYS[1]: 0, KEYS[0]: None})]) or ""
            null = re.search(f"{KEYS[0]}:(\\w+)", text)
            is_sorted = text.find(KEYS[0]) < text.find(KEYS[1])
            form = replace(form, null=null[1] if null else form.null, is_sorted=is_sorted)
            return replace(derived, arguments=form)
        return self._with_element_details(derived)

    def _with_element_details(self, derived: CallFormat) -> CallFormat:
        """Adds how elements name the types of their values, and write markup."""
        form = derived.arguments
        if not isinstance(form, ElementArguments):
            return derived
        before, _, _ = form.open.partition("{name}")
        openings = dict[str, str]()
        for name, value in _TYPED.items():
            text = self._probe.calls([self._call(0, {KEYS[0]: value})]) or ""
            after_key = text.partition(before + KEYS[0])[2]
            for option in (element_text(value), str(value)):  # some write Python's form
                place = after_key.find(option + form.close)
                if place >= 0:
                    openings[name] = after_key[:place]
                    break
        if len(set(openings.values())) > 1:
            start = functools.reduce(common_prefix, openings.values())
            rest = [opening[len(start) :] for opening in openings.values()]
            end = functools.reduce(_common_suffix, rest)
            start, end = start.rstrip(_LETTERS), end.lstrip(_LETTERS)  # a type is a whole word
            types = tuple((name, text[len(start) : len(text) - len(end)]) for name, text in openings.items())
            form = replace(form, open=f"{before}{{name}}{start}{{type}}{end}", types=types)
        markup = self._probe.calls([self._call(0, {KEYS[0]: "<b>"})]) or ""
        cdata = "<![CDATA[<b>]]>" in markup
        return replace(derived, arguments=replace(form, has_cdata=cdata, python=self._python_form(form.close)))

    def _python_form(self, close: str) -> PythonForm:
        """Returns which values the template writes as Python does."""
        if self._takes_text:
            return ""
        texts = [self._probe.calls([self._call(0, {KEYS[0]: value})]) or "" for value in (True, [True])]
        is_python = [f"{text}{close}" in whole for text, whole in zip(("True", "[True]"), texts, strict=True)]
        return "values" if all(is_python) else "scalars" if is_python[0] else ""


def _first_mark(text: str) -> str:
    match = _TAG.match(text)
    return match[0] if match else ""


def _checked(derived: CallFormat | None) -> CallFormat | None:
    """Refuses a format whose calls do not have their names, or begin with an ordinary word."""
    if derived is None or "{name}" not in derived.head:
        return None
    is_message = re.search(r"^[^<\[{>.]*\{name\}<", derived.begin + derived.head)  # as in `to={name}<|message|>`
    return derived if re.search(r"[<\[{>]", derived.opener) or is_message else None


def _mask_counter(first: str, between: str, last: str) -> tuple[str, str, str, int | None]:
    """Replaces a number that counts calls by {id}: it differs by one between the first call and the second.

    Also returns the first one's number.
    """
    for a, b in itertools.product(_NUMBER.finditer(first), _NUMBER.finditer(between)):
        if int(b[0]) != int(a[0]) + 1:
            continue
        masked = first[: a.start()] + "{id}" + first[a.end() :], between[: b.start()] + "{id}" + between[b.end() :]
        if "{id}" in _common_suffix(*masked):
            return *masked, last, int(a[0])
    return first, between, last, None


def _find_arguments(text: str, arguments: Mapping[str, Any]) -> _Arguments | None:
    """Finds the first call's arguments in a rendering."""
    finders = (_find_json, _find_keywords, _find_notation, _find_elements)
    return next(filter(None, (find(text, arguments) for find in finders)), None)


def _find_json(text: str, arguments: Mapping[str, Any]) -> _Arguments | None:
    for match in re.finditer(r"\{", text):
        try:
            value, end = _DECODER.raw_decode(text, match.start())
        except ValueError:
            continue
        if value == arguments:
            styles = [JsonArguments("spaced"), JsonArguments("compact")]
            written = (form for form in styles if form.render(arguments) == text[match.start() : end])
            return _Arguments(match.start(), end, next(written, JsonArguments("any")))
    return None


def _find_keywords(text: str, arguments: Mapping[str, Any]) -> _Arguments | None:
    for form in (KeywordArguments(single_quotes=True), KeywordArguments()):
        written = form.render(arguments)
        start = text.find(written)
        if start >= 0:
            return _Arguments(start, start + len(written), form)
    return None


def _find_notation(text: str, arguments: Mapping[str, Any]) -> _Arguments | None:
    (k1, k2), (v1, v2) = KEYS, VALUES
    match = re.search(rf"\{{{k1}:(\S+?){v1}\1,{k2}:\1{v2}\1\}}", text)
    return None if match is None else _Arguments(match.start(), match.end(), NotationArguments(match[1]))


def _find_elements(text: str, arguments: Mapping[str, Any]) -> _Arguments | None:
    (k1, k2), (v1, v2) = KEYS, VALUES
    match = re.search(f"{k1}(.+?){v1}(.*?){k2}\\1{v2}", text, re.DOTALL)
    if match is None:
        return None
    parts = split_repeated(text[: match.start()], match[2], text[match.end() :])
    if not parts.tail:
        return None
    form = ElementArguments(f"{parts.head}{{name}}{match[1]}", parts.tail, parts.separator)
    return _Arguments(match.start() - len(parts.head), match.end() + len(parts.tail), form)
