"""The keywords of JSON Schema, drafts 4 to 2020-12: the types of their values, and which are annotations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plait.constrained.specs import GrammarError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TYPES = frozenset(("null", "boolean", "object", "array", "string", "integer", "number"))
ANNOTATIONS = _words(
    "$schema $id id $comment $anchor $dynamicAnchor $recursiveAnchor $vocabulary $defs definitions title description "
    "default example examples readOnly writeOnly deprecated contentEncoding contentMediaType contentSchema "
    "discriminator"
)
ASSERTIONS = _words(
    "type enum const format pattern minLength maxLength minimum maximum exclusiveMinimum exclusiveMaximum "
    "multipleOf items prefixItems additionalItems contains minContains maxContains minItems maxItems uniqueItems "
    "unevaluatedItems properties patternProperties additionalProperties propertyNames required minProperties "
    "maxProperties dependentRequired dependentSchemas dependencies unevaluatedProperties allOf anyOf oneOf not if "
    "then else $ref"
)
UNSUPPORTED = {
    "$dynamicRef": "several schemas have this dynamic anchor, or none",
    "$recursiveRef": "several schemas have a recursive anchor",
    "x-guidance": "this keyword would control a library and is not accepted",
}
COUNTS = _words("minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains")
_NUMBERS = frozenset(("minimum", "maximum", "multipleOf"))
_SCHEMAS = _words(
    "additionalItems contains unevaluatedItems additionalProperties propertyNames unevaluatedProperties not if "
    "then else"
)
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_MAPS = frozenset(("properties", "patternProperties", "dependentSchemas"))
_OBJECTS = frozenset(("items", "dependentRequired", "dependencies", "const"))  # among others
_NULLABLE = "nullable is OpenAPI's; write the type as a list with null in it"


def unknown_keyword_reason(name: str, value: object) -> str | None:
    """Returns why an unknown keyword is refused; None if it counts as an annotation.

    As the specification says, a name that is no keyword is an annotation. A probable misspelling of one is refused.

    >>> unknown_keyword_reason("minLenght", 3)
    'not a keyword; perhaps minLength is meant'
    >>> unknown_keyword_reason("_minLength", 3) is None
    True
    """
    if name == "nullable":
        return _NULLABLE if value is not False else None
    keyword = misspelt_keyword(name, ASSERTIONS)
    if keyword and isinstance(value, dict) and not _takes_object(keyword):
        return None  # a name for definitions, as in {"definitions": {"Type": {...}}}
    return f"not a keyword; perhaps {keyword} is meant" if keyword else None


def _takes_object(keyword: str) -> bool:
    return keyword in _SCHEMAS | _MAPS | _OBJECTS


def check_keyword_value(name: str, value: Any, at: str) -> None:
    """Raises GrammarError if the value of keyword `name` is not allowed in any draft.

    >>> check_keyword_value("minLength", 3, "")
    """
    if name in COUNTS:
        good = _is_number(value) and value >= 0 and value == int(value)
    elif name in _NUMBERS:
        good = _is_number(value) and (name != "multipleOf" or value > 0)
    elif name in ("exclusiveMinimum", "exclusiveMaximum"):
        good = _is_number(value) or isinstance(value, bool)
    elif name in _SCHEMAS:
        good = isinstance(value, dict | bool)
    elif name in _LISTS:
        good = _is_list_of_schemas(value) and (bool(value) or name == "prefixItems")
    elif name in _MAPS:
        good = isinstance(value, dict) and all(isinstance(item, dict | bool) for item in value.values())
    else:
        good = _is_other_keyword_valid(name, value)
    if not good:
        raise GrammarError(f"the value of {name} has a wrong type or range", f"{at}/{name}")


def _is_other_keyword_valid(name: str, value: Any) -> bool:
    match name:
        case "type":
            listed = [value] if isinstance(value, str) else value
            return isinstance(listed, list) and bool(listed) and all(isinstance(t, str) and t in TYPES for t in listed)
        case "enum":
            return isinstance(value, list)
        case "required":
            return is_string_list(value)
        case "items":
            return isinstance(value, dict | bool) or _is_list_of_schemas(value)
        case "uniqueItems":
            return isinstance(value, bool)
        case "format" | "pattern" | "$ref":
            return isinstance(value, str)
        case "dependentRequired":
            return isinstance(value, dict) and all(is_string_list(names) for names in value.values())
        case "dependencies":
            return isinstance(value, dict) and all(
                isinstance(i, dict | bool) or is_string_list(i) for i in value.values()
            )
    return True


def is_string_list(value: object) -> bool:
    """Returns whether `value` is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_list_of_schemas(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict | bool) for item in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- misspellings ----------------------------------------------------------------------------------
# Finds the keyword that an unknown name of a schema most likely misspells.

_EXEMPT_STARTS = ("_", "$", "@", "x-", "X-")
_WORDS = frozenset(("cost", "cons", "ten", "the", "hen"))  # that are one letter from a short keyword
_SHORT = 5  # letters; a substituted letter makes most words of this length another word
_LONG = 8
_SPOKEN = {"property": "properties", "ref": "$ref", "patternproperty": "patternProperties"}


def misspelt_keyword(name: str, keywords: Iterable[str]) -> str | None:
    """Returns the keyword that a person who wrote `name` probably meant; None if `name` is another word.

    >>> [misspelt_keyword(name, ["minLength", "type", "items"]) for name in ("min_length", "typ", "itmes", "title")]
    ['minLength', 'type', 'items', None]
    """
    if name.startswith(_EXEMPT_STARTS):
        return None
    written = name.replace("_", "").replace("-", "").lower()
    if written in _SPOKEN:
        return _SPOKEN[written]
    if written in _WORDS:
        return None
    near = [keyword for keyword in keywords if len(keyword) > 3 and _is_near(written, keyword.lower())]
    return min(near, key=lambda keyword: (_distance(written, keyword.lower()), keyword)) if near else None


def _is_near(written: str, keyword: str) -> bool:
    if abs(len(written) - len(keyword)) > 2 or written[:1] != keyword[:1]:
        return False
    if len(keyword) > _SHORT:
        return _distance(written, keyword) <= (2 if len(keyword) >= _LONG else 1)
    is_missing_one = any(keyword[:i] + keyword[i + 1 :] == written for i in range(1, len(keyword)))
    is_doubled = any(keyword[: i + 1] + keyword[i:] == written for i in range(len(keyword)))
    swapped = [keyword[:i] + keyword[i + 1] + keyword[i] + keyword[i + 2 :] for i in range(1, len(keyword) - 1)]
    return written in (keyword, keyword + "s") or is_missing_one or is_doubled or written in swapped


def _distance(one: str, other: str) -> int:
    """Returns how many letters must be inserted, removed, replaced or swapped with the next one."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i in range(1, len(one) + 1):
        before, last, row = row, before, [i]
        for j in range(1, len(other) + 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (one[i - 1] != other[j - 1]))
            if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
