"""Structural specs: accepted texts with tagged calls, lenient checks, and invalid arguments."""

from __future__ import annotations

import pytest
from byte_grammars import accepts, refusal
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY

from plait.constrained import GrammarError, Lark, Structural
from plait.constrained.specs import JsonObject, JsonSchema

REFUSED = {"pattern": r"^(a)\1"}  # a pattern that refers back is not regular
NUMBER, TEXT = ("<n>", {"type": "integer"}, "</n>"), ("<t>", {"type": "string", "maxLength": 2}, "</t>")


def test_free_text_with_calls() -> None:
    free = Structural([NUMBER, TEXT])
    good = ["", "hi", "a<n>1</n>", '<t>"x"</t><n>2</n> b', "<n>1</n><t", "<", "<n>1</n></n>"]
    assert all(accepts(free, *good))
    bad = ["<n>", "<n>x", '<n>"x"</n>', "<n>1</t>", "a <t> <n>1</n>", "<n>1</n><t>", '<t>"abc"</t>', "<n> 1</n>"]
    assert not any(accepts(free, *bad))


def test_at_least_and_at_most_count_calls() -> None:
    auto, required = Structural([NUMBER], at_most=1), Structural([NUMBER], at_least=1, at_most=2, free_text=False)
    texts = ["", "a", "<n>1</n>", "a<n>1</n>b", "<n>1</n><n>2</n>", "<n>1</n><n>2</n><n>3</n>"]
    assert accepts(auto, *texts) == [True, True, True, True, False, False]
    assert accepts(required, *texts) == [False, False, True, False, True, False]


def test_otherwise_allows_a_value_instead_of_calls() -> None:
    person = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False})
    texts = ["", "{}", '{"a": 1}', "<n>1</n>", "<n>1</n><n>2</n>", '{"a": "x"}', "{}<n>1</n>", "<n>1</n>{}", "hi", "{"]
    several = Structural([NUMBER, TEXT], free_text=False, otherwise=person)
    assert accepts(several, *texts) == [False, True, True, True, True, False, False, False, False, False]
    single = Structural([NUMBER, TEXT], at_most=1, free_text=False, otherwise=JsonObject())
    assert accepts(single, *texts) == [False, True, True, True, False, True, False, False, False, False]
    bad = Structural([NUMBER], free_text=False, otherwise=JsonSchema({"items": REFUSED}))
    assert refusal(bad).where == "/otherwise/items/pattern"


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Structural([]), None),
        (lambda: Structural([("", {}, "x")]), 0),
        (lambda: Structural([NUMBER, NUMBER]), 1),
        (lambda: Structural([NUMBER, ("<n", {}, "x")]), 1),
        (lambda: Structural([NUMBER], at_least=3, at_most=2), None),
        (lambda: Structural([NUMBER], at_least=-1), None),
        (lambda: Structural([NUMBER], otherwise=JsonSchema(True)), None),
        (lambda: Structural([NUMBER], at_least=1, free_text=False, otherwise=JsonSchema(True)), None),
        (lambda: Structural([NUMBER], free_text=False, otherwise_begin="x"), None),
        (lambda: Structural([NUMBER], first_number=1), None),
        (lambda: Structural([("a", {}, 5)]), 0),
        (lambda: JsonSchema({"a": float("nan")}), None),
        (lambda: JsonSchema({"a": {1, 2}}), None),
        (lambda: JsonSchema("x" * (1 << 20) + "y"), None),
        (lambda: JsonSchema(5), None),
        (lambda: Lark("x" * (1 << 19)), None),
    ],
)
def test_invalid_arguments_raise_when_the_spec_is_made(make: object, where: int | None) -> None:
    with pytest.raises(GrammarError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.where == where


def test_an_unsupported_schema_raises_with_the_index_of_its_trigger() -> None:
    error = refusal(Structural([NUMBER, ("<x>", {"items": REFUSED}, "</x>")]))
    assert error.where == "/triggers/1/content/items/pattern"


def test_lenient_checks_every_call_of_a_finished_text() -> None:
    twice, pair = {"items": {"items": REFUSED}}, {"type": "array", "items": {"type": "integer"}, "minItems": 2}
    spec = Structural([("<x>", twice, "</x>"), ("<y>", pair, "</y>")], lenient=True)
    grammar = compile_in_process(spec, BYTE_VOCABULARY)
    assert grammar.unchecked == ("/triggers/0/content/items/items/pattern",)
    for good in ("", "no call", "<x>[]</x>", 'a<x>[[1,"aa"]]</x>b<y>[1,1]</y><x>[["aa</x>"]]</x> end'):
        assert grammar.check(good) is None, good
    assert 'behind the <x> at 1: "a" does not match' in str(grammar.check('a<x>[["a"]]</x>'))
    assert "<x> at 17" in str(grammar.check('<y>[1,2]</y> and <x>[["a"]]</x>'))
    assert "<y> at 0" in str(grammar.check("<y>[1]</y>"))
    assert "not JSON" in str(grammar.check("<x>[1,"))
    assert "its end does not follow" in str(grammar.check("<x>[] </x>"))
    strict = compile_in_process(Structural([("<y>", pair, "</y>")], lenient=True), BYTE_VOCABULARY)
    assert strict.unchecked == ()
    assert strict.check("<y>[1]</y>") is None, "a schema that the masks enforce is not checked again"
