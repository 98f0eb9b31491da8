"""Compiles Structural to a grammar of llguidance: where calls begin in free text, and what stands around them.

start: call{1,} TAIL                              blocks anywhere in free text
call: open0 ("\\n{...f..." value0 "}</c>" | "\\n{...g..." value1 "}</c>")
open0[lazy]: /(?s:.*)/ "<c>"                      free text up to and with the first opener of any kind
TAIL: /(?s:.*)/ & ~/(?s:.*)(<c>)(?s:.*)/          free text without an opener

start: open0 (... value0 ...) ("," "{...f..." value0 "}" | ...)* "]" TAIL      all calls together
"""

from __future__ import annotations

import json

import llguidance
import msgspec

from plait.constrained.guidance.call_tracker import CallTexts
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, ensure_compiles
from plait.constrained.json_schema.lark_scalars import regex_literal
from plait.constrained.json_schema.schema_compiler import json_rules
from plait.constrained.json_validation import Segment
from plait.constrained.specs import (
    ID_PLACE,
    MAX_NUMBERED,
    NAME_PLACE,
    Elements,
    GrammarError,
    JsonObject,
    JsonSchema,
    Keywords,
    Notation,
    Structural,
    Trigger,
)
from plait.constrained.structural.contents import ContentRules, content_rules
from plait.constrained.structural.marks import Marks
from plait.constrained.tokens.number_limiter import digit_limit
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_MARKS = 8  # that a completion tries at each step


def compile_structural(spec: Structural, vocabulary: Vocabulary) -> LlguidanceSource:
    """Compiles free text that contains calls. Raises GrammarError with the pointer of what is refused.

    >>> compile_structural(Structural([("<a>", True, "</a>")]), vocabulary)          # doctest: +SKIP
    """
    marks = Marks(spec, vocabulary)
    contents = [_content(trigger, index, spec, marks) for index, trigger in enumerate(spec.calls)]
    rules = _Layout(spec, marks, contents).rules()
    unchecked = [pointer for content in contents for pointer in content.unchecked]
    warnings = [warning for content in contents for warning in content.warnings]
    otherwise = None if spec.otherwise is None else _otherwise(spec.otherwise)
    if otherwise is not None:
        rules += otherwise.rules
        unchecked += otherwise.unchecked
        warnings += otherwise.warnings
    schemas = [trigger.schema for trigger in spec.calls if trigger.schema is not None]
    schemas += [spec.otherwise.text] if isinstance(spec.otherwise, JsonSchema) else []
    return ensure_compiles(
        LlguidanceSource(
            llguidance.LLMatcher.grammar_from_lark("\n".join(rules)),
            tuple(unchecked),
            segments=_segments(spec, marks) if unchecked else (),
            max_digits=max(map(digit_limit, schemas), default=0),
            json_delimiters=_json_delimiters(spec, marks),
            free_text=spec.free_text,
            warnings=tuple(dict.fromkeys(warnings)),
            control_tokens=tuple(marks.control_tokens.items()),
            marks=_marks(spec),
            calls=_call_texts(spec, contents, otherwise, marks),
        ),
        vocabulary,
    )


def _call_texts(
    spec: Structural, contents: list[ContentRules], otherwise: ContentRules | None, marks: Marks
) -> CallTexts | None:
    """Returns what is needed to follow the calls; None if no array in them must have unique items."""
    if not any(content is not None and content.unique for content in (*contents, otherwise)):
        return None
    return CallTexts(
        tuple(
            msgspec.structs.replace(
                content.text,
                begin=marks.pattern(call.begin, with_id=True),
                end=marks.pattern(call.end, with_id=True),
                unique=json.dumps(content.unique) if content.unique else "",
            )
            for call, content in zip(spec.calls, contents, strict=True)
        ),
        marks.pattern(spec.begin),
        marks.pattern(spec.separator),
        spec.is_section,
        spec.at_start,
        None if otherwise is None else json.dumps(otherwise.unique) if otherwise.unique else "",
        marks.pattern(spec.otherwise_begin),
    )


def _marks(spec: Structural) -> tuple[str, ...]:
    """Returns the texts that end texts which may have any characters, where they are fixed."""
    found = ["="] if any(isinstance(call.content, Keywords) for call in spec.calls) else []
    for call in spec.calls:
        if isinstance(call.content, Elements):
            found += [call.content.close, call.content.open.split(NAME_PLACE)[1]]
        found += [call.content.quote] if isinstance(call.content, Notation) else []
    found += [call.end for call in spec.calls if not _is_json(call)]
    if spec.is_section:  # another call or the end: each may begin alike
        found += [spec.end, *(_rest_of(spec.end, spec.separator + call.begin) for call in spec.calls)]
    elements = [(call.end, call.content) for call in spec.calls if isinstance(call.content, Elements)]
    found += [_rest_of(end, content.separator + content.open) for end, content in elements]
    fixed = dict.fromkeys(mark for mark in found if mark and not (spec.call_id and ID_PLACE in mark))
    return tuple(fixed)[:MAX_MARKS]


def _rest_of(mark: str, other: str) -> str:
    """Returns what is left of a mark behind the text with which another one begins, too."""
    return next((mark[at:] for at in range(len(mark)) if mark[at] != other[at : at + 1]), "")


def _is_json(call: Trigger) -> bool:
    return isinstance(call.content, str | JsonSchema | JsonObject)


def _segments(spec: Structural, marks: Marks) -> tuple[Segment, ...]:
    """Returns the parts of a text that are JSON, for validation."""
    return tuple(
        Segment(
            marks.text_pattern(call.begin),
            call.schema or "",
            marks.text_pattern(call.end),
        )
        for call in spec.calls
        if _is_json(call)
    )


def _json_delimiters(spec: Structural, marks: Marks) -> tuple[tuple[bytes, bytes], ...] | None:
    """Returns the texts around the JSON of each kind of call; None if they are not fixed, or not all of it is JSON."""
    if spec.call_id or not all(map(_is_json, spec.calls)):
        return None
    found = [(spec.begin + call.begin, call.end) for call in spec.calls]
    found += [(spec.separator + call.begin, call.end) for call in spec.calls] if spec.is_section else []
    return tuple((marks.to_bytes(begin), marks.to_bytes(end)) for begin, end in found)


def _content(trigger: Trigger, index: int, spec: Structural, marks: Marks) -> ContentRules:
    pointer = f"/triggers/{index}/content"
    try:
        found = content_rules(trigger, f"value{index}", spec, marks)
    except GrammarError as error:
        tool = f"tool {trigger.name!r:.100}: " if trigger.name else ""
        if isinstance(error.where, str):
            raise GrammarError(tool + error.reason, pointer + error.where) from None
        raise GrammarError(f"{tool}{error}", pointer) from None  # an index into a pattern or a grammar
    return found.at(pointer)


def _otherwise(spec: JsonSchema | JsonObject) -> ContentRules:
    try:
        found = json_rules(spec, "otherwise")
    except GrammarError as error:
        raise GrammarError(error.reason, f"/otherwise{error.where if isinstance(error.where, str) else ''}") from None
    return ContentRules("otherwise", found.rules, found.unchecked, found.warnings, found.unique).at("/otherwise")


class _Layout:
    """Writes the rules of a spec whose contents have rules already."""

    def __init__(self, spec: Structural, marks: Marks, contents: list[ContentRules]) -> None:
        self._spec, self._marks, self._contents = spec, marks, contents
        self._openers = spec.openers or ((spec.begin,) if spec.begin else tuple(call.begin for call in spec.calls))
        self._rules = [rule for content in contents for rule in content.rules]
        self._has_behind = False
        plain = [opener for opener in self._openers if not marks.split(opener)[1]]
        without = f" & ~/(?s:.*)({'|'.join(map(regex_literal, plain))})(?s:.*)/" if plain else ""
        self._free = f"/(?s:.*)/{without}"  # free text without an opener
        self._skipped = self._skipping() if spec.free_text and not spec.at_start else ""

    def rules(self) -> list[str]:
        spec = self._spec
        needs_call = spec.otherwise is not None or spec.at_start
        calls = self._section() if spec.is_section else self._blocks(1 if needs_call else spec.at_least)
        may_miss = spec.is_section and spec.at_least == 0 and spec.otherwise is None
        if spec.at_start:
            openers = "|".join(map(regex_literal, self._openers))
            self._rules.append(f"TEXT: /(?s:.*)/ & ~/[ \\t\\r\\n]*({openers})(?s:.*)/")
            start = f"{calls} | TEXT"
        elif spec.free_text:
            self._rules.append(f"TAIL: {self._free}{self._not_another_call()}")
            tail = self._behind_skipped("TAIL")
            start = f"{calls} {tail}" + (f" | {tail}" if may_miss else "")
        else:
            other = f" | {self._marks.literal(spec.otherwise_begin)} otherwise"
            start = calls + (other if spec.otherwise is not None else ' | ""' if may_miss else "")
        return [f"start: {start}", *self._rules]

    def _blocks(self, at_least: int) -> str:
        self._rules.append(f"call: {self._first()}")
        return f"call{{{at_least},{'' if self._spec.at_most is None else self._spec.at_most}}}"

    def _section(self) -> str:
        spec = self._spec
        most = "" if spec.at_most is None else spec.at_most - 1
        first, more = self._first(), ""
        if most != 0:
            num_counted = 1 if spec.first_number is None else MAX_NUMBERED
            num_counted = num_counted if spec.at_most is None else min(num_counted, spec.at_most)
            if spec.at_most is None or num_counted < spec.at_most:
                self._rules.append(f"more: {self._another(num_counted)}")
                most = "" if spec.at_most is None else spec.at_most - num_counted
                more = f" more{{{max(spec.at_least - num_counted, 0)},{most}}}"
            for index in reversed(range(1, num_counted)):
                end = ' | ""' if index >= spec.at_least else ""
                self._rules.append(f"more{index}: ({self._another(index)}){more}{end}")
                more = f" more{index}"
        self._rules.append(f"calls: ({first}){more} {self._marks.literal(spec.end)}")
        return "calls"

    def _another(self, index: int) -> str:
        """Returns the expression of the call with this index, which is not the first one, with the separator."""
        options = [
            f"{self._marks.literal(self._counted(self._spec.separator + call.begin, index), with_id=True)} "
            + content.expression
            for call, content in zip(self._spec.calls, self._contents, strict=True)
        ]
        return " | ".join(options)

    def _counted(self, text: str, index: int) -> str:
        """Returns a beginning with the number of the call, if calls are counted."""
        first = self._spec.first_number
        is_counted = first is not None and self._spec.is_section and index < MAX_NUMBERED
        return text.replace(ID_PLACE, str((first or 0) + index)) if is_counted else text

    def _first(self) -> str:
        """Returns the expression of a call with the free text before it."""
        grouped: dict[str, list[str]] = {}
        for call, content in zip(self._spec.calls, self._contents, strict=True):
            whole = self._spec.begin + call.begin
            opener = next(opener for opener in self._openers if whole.startswith(opener))
            opener = opener if self._spec.free_text and not self._spec.at_start else ""
            rest = self._marks.literal(self._counted(whole[len(opener) :], 0), with_id=True)
            grouped.setdefault(opener, []).append(f"{rest} {content.expression}")
        return " | ".join(f"{self._opening(opener)} ({' | '.join(calls)})" for opener, calls in grouped.items())

    def _opening(self, opener: str) -> str:
        """Returns the expression of free text and an opener."""
        if not opener:
            return ""
        name = f"open{self._openers.index(opener)}"
        plain, control = self._marks.split(opener)
        if not control:
            self._rules.append(f"{name}[lazy]: /(?s:.*)/ {self._marks.literal(plain)}")
            return f"{self._skipped} {name}" if not self._has_behind else f"({self._skipped} | behind) {name}"
        terminal = f"FREE{self._openers.index(opener)}"
        if plain:
            self._rules.append(f"{terminal}F: {self._free}")
        self._rules.append(
            f"{terminal}: {terminal}F {self._marks.literal(plain)}" if plain else f"{terminal}: {self._free}"
        )
        return f"{self._behind_skipped(terminal)} {control}"

    def _skipping(self) -> str:
        """Adds the rules of free text up to the last control token in it; `behind` is that up to one which begins an
        opener, whose next text does not follow. Returns the name of the rule; "" if there are no such tokens."""
        openers = [self._marks.split(opener) for opener in self._openers]
        tokens = {text: self._marks.split(text)[1] for text in self._spec.free_tokens}
        begun = {  # the texts with which openers go on behind a token
            token: [self._marks.split(opener[len(text) :])[0] for opener in self._openers if opener.startswith(text)]
            for text, token in tokens.items()
        }
        begun = {token: texts for token, texts in begun.items() if texts and all(texts)}
        skipped, behind = ['""'], list[str]()
        self._has_behind = bool(begun)
        self._not_begun = "|".join(regex_literal(text) for texts in begun.values() for text in texts)
        for index, token in enumerate(tokens.values()):
            before = [plain for plain, control in openers if control.startswith(token)]
            if "" in before and token not in begun:
                continue
            ends = "|".join(regex_literal(plain) for plain in before if plain)
            self._rules.append(f"SKIP{index}: {self._free}" + (f" & ~/(?s:.*)({ends})/" if ends else ""))
            (behind if token in begun else skipped).append(f"{self._behind_skipped(f'SKIP{index}')} {token}")
        if behind:
            self._rules.append(f"behind: {' | '.join(behind)}")
        if not tokens:
            return ""
        self._rules.append(f"skipped: {' | '.join(skipped)}")
        return "skipped"

    def _behind_skipped(self, terminal: str) -> str:
        """Returns the expression of a terminal of free text behind what was skipped."""
        skipped = "skipped" if self._spec.free_tokens else ""
        if not self._has_behind:
            return f"{skipped} {terminal}"
        self._rules.append(f"{terminal}X: {terminal} & ~/({self._not_begun})(?s:.*)/")
        return f"({skipped} {terminal} | behind {terminal}X)"

    def _not_another_call(self) -> str:
        """Returns what excludes free text that begins like one more call, where nothing else ends the calls."""
        spec = self._spec
        if not spec.is_section or spec.end:
            return ""
        begins = [self._marks.split(spec.separator + call.begin) for call in spec.calls]
        plain = [text for text, control in begins if text and not control]
        return f" & ~/({'|'.join(map(regex_literal, plain))})(?s:.*)/" if plain else ""
