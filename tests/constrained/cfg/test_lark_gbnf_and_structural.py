"""Lark, GBNF and structural texts: what they accept, where they are wrong; and bombs, which end within their time."""

from __future__ import annotations

import re
from itertools import product
from time import monotonic

import pytest
from expensive_specs import EXPENSIVE_SPECS

from plait.constrained import Ebnf, GrammarError, Lark, Structural, Vocabulary, compile_grammar
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.dfa.dfa_grammar import DfaGrammar
from plait.constrained.specs import JsonObject, JsonSchema, Regex, Spec

BYTES = Vocabulary((b"", *(bytes([byte]) for byte in range(256))), (0,), lambda text: [1 + b for b in text.encode()])


def accepts(spec: Spec, *texts: str) -> list[bool]:
    grammar = build_grammar(compile_spec(spec, BYTES), BYTES)
    answers = []
    for text in texts:
        matcher = grammar.matcher()
        answers.append(all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.is_accepting)
    return answers


def refusal(spec: Spec) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        compile_spec(spec, BYTES)
    return caught.value


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "a" [b-d]+ | num\nnum ::= [0-9]{1,2} # digits\n', "a[b-d]+|[0-9]{1,2}"),
        ('root ::= ("a" | "b"\n | "c")* "d"?', "[abc]*d?"),
        ('root ::= [^a-c] "\\n"{0,1} .', "[^a-c]\n?(?s:.)"),
        ('root ::= "ab"{2} | "\\x64\\u0031"', "abab|d1"),
        ("root ::= x x\nx ::= y?\ny ::= [1a]", "[1a]{0,2}"),
    ],
)
def test_gbnf_without_recursion_is_an_automaton(grammar: str, pattern: str) -> None:
    assert isinstance(build_grammar(compile_spec(Ebnf(grammar), BYTES), BYTES), DfaGrammar)
    texts = ["".join(text) for size in range(5) for text in product("abd1\n", repeat=size)]
    assert accepts(Ebnf(grammar), *texts) == [re.fullmatch(pattern, text) is not None for text in texts]


def test_gbnf_with_recursion_splits_texts_in_every_way() -> None:
    grammar = Ebnf('root ::= "ab" | [ab]* "b" tail\ntail ::= "!" | "(" root ")"')

    def is_in(text: str) -> bool:
        head = re.fullmatch(r"[ab]*b(.*)", text, re.DOTALL)
        if text == "ab" or (head and head[1] == "!"):
            return True
        return bool(head and head[1][:1] == "(" and head[1][-1:] == ")" and is_in(head[1][1:-1]))

    texts = ["".join(text) for size in range(7) for text in product("ab!()", repeat=size) if text.count("!") < 2]
    assert accepts(grammar, *texts) == [is_in(text) for text in texts]


@pytest.mark.parametrize(
    ("grammar", "where", "reason"),
    [
        ("", None, "no rule named root"),
        ("root ::= x", 9, "no rule named x"),
        ('root ::= "a', 9, "not closed"),
        ("root ::= [a", 9, "not closed"),
        ("root ::= [b-a]", 9, "out of order"),
        ("root ::= (a", 9, "not closed"),
        ('root ::= "a" )', 13, "unexpected text"),
        ('root = "a"', 5, "::= is expected"),
        ('root ::= "a"{2,1}', 12, "out of order"),
        ('root ::= "a"{x}', 12, "a count is written"),
        (r'root ::= "\q"', 10, "escape"),
        ('root ::= "a"\nroot ::= "b"', 13, "given twice"),
        ("root ::= " + "(" * 200, None, "nested"),
        ("root ::= a{1000}\na ::= b{1000}\nb ::= [a-z]{1000}", None, "too large"),
    ],
)
def test_gbnf_errors_have_a_place(grammar: str, where: int | None, reason: str) -> None:
    error = refusal(Ebnf(grammar))
    assert re.search(reason, error.reason)
    assert where is None or error.where == where


def test_lark() -> None:
    grammar = Lark('start: "(" start ")" | NUMBER ("," NUMBER)*\nNUMBER: /[0-9]+/')
    assert accepts(grammar, "12,3", "((1))", "(1", "", "1,") == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("grammar", "where", "reason"),
    [
        ("start: <|im_end|>", 7, "control token"),
        ("start: <[256]>", 7, "control token"),
        ('start: %json {"type": "object"}', 7, "%json"),
        ('%llguidance {}\nstart: "a"', 0, "%llguidance"),
        ("start: @other", 7, "references to other grammars"),
        ('start[max_tokens=3]: "a"', 5, "max_tokens"),
        ("start: nothing", 7, "unknown name"),
        ('rule: "a"', None, "start"),
        ("start: s\ns: s", None, "spell|infinite|rule|start"),
    ],
)
def test_lark_errors_have_a_place(grammar: str, where: int | None, reason: str) -> None:
    error = refusal(Lark(grammar))
    assert re.search(reason, error.reason)
    assert error.where == where


NUMBER, TEXT = ("<n>", {"type": "integer"}, "</n>"), ("<t>", {"type": "string", "maxLength": 2}, "</t>")


def test_structural_texts() -> None:
    free = Structural([NUMBER, TEXT])
    good = ["", "hi", "a<n>1</n>", '<t>"x"</t><n>2</n> b', "<n>1</n><t", "<", "<n>1</n></n>"]
    assert all(accepts(free, *good))
    bad = ["<n>", "<n>x", '<n>"x"</n>', "<n>1</t>", "a <t> <n>1</n>", "<n>1</n><t>", '<t>"abc"</t>', "<n> 1</n>"]
    assert not any(accepts(free, *bad))


def test_structural_counts_express_tool_choice() -> None:
    auto, required = Structural([NUMBER], at_most=1), Structural([NUMBER], at_least=1, at_most=2, free_text=False)
    texts = ["", "a", "<n>1</n>", "a<n>1</n>b", "<n>1</n><n>2</n>", "<n>1</n><n>2</n><n>3</n>"]
    assert accepts(auto, *texts) == [True, True, True, True, False, False]
    assert accepts(required, *texts) == [False, False, True, False, True, False]


def test_structural_calls_or_else_a_value() -> None:
    person = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False})
    texts = ["", "{}", '{"a": 1}', "<n>1</n>", "<n>1</n><n>2</n>", '{"a": "x"}', "{}<n>1</n>", "<n>1</n>{}", "hi", "{"]
    several = Structural([NUMBER, TEXT], free_text=False, otherwise=person)
    assert accepts(several, *texts) == [False, True, True, True, True, False, False, False, False, False]
    one = Structural([NUMBER, TEXT], at_most=1, free_text=False, otherwise=JsonObject())
    assert accepts(one, *texts) == [False, True, True, True, False, True, False, False, False, False]
    bad = Structural([NUMBER], free_text=False, otherwise=JsonSchema({"items": {"uniqueItems": True}}))
    assert refusal(bad).where == "/otherwise/items/uniqueItems"


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
        (lambda: Structural([("a", {}, 5)]), 0),
        (lambda: JsonSchema({"a": float("nan")}), None),
        (lambda: JsonSchema({"a": {1, 2}}), None),
        (lambda: JsonSchema("x" * (1 << 20) + "y"), None),
        (lambda: JsonSchema(5), None),
        (lambda: Lark("x" * (1 << 19)), None),
    ],
)
def test_limits_are_checked_on_entry(make: object, where: int | None) -> None:
    with pytest.raises(GrammarError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.where == where


def test_a_trigger_with_a_bad_schema_is_named() -> None:
    error = refusal(Structural([NUMBER, ("<x>", {"items": {"uniqueItems": True}}, "</x>")]))
    assert error.where == "/triggers/1/schema/items/uniqueItems"


def test_a_lenient_structural_text_is_checked_call_by_call() -> None:
    unique, pair = {"items": {"uniqueItems": True}}, {"type": "array", "items": {"type": "integer"}, "minItems": 2}
    spec = Structural([("<x>", unique, "</x>"), ("<y>", pair, "</y>")], lenient=True)
    grammar = build_grammar(compile_spec(spec, BYTES), BYTES)
    assert grammar.unchecked == ("/triggers/0/schema/items/uniqueItems",)
    for good in ("", "no call", "<x>[]</x>", 'a<x>[["</x>",1]]</x>b<y>[1,1]</y><x>[[1,2]]</x> end'):
        assert grammar.check(good) is None, good
    assert "behind the <x> at 1: [1,1] has non-unique" in str(grammar.check("a<x>[[1,1]]</x>"))
    assert "<x> at 17" in str(grammar.check("<y>[1,2]</y> and <x>[[1,1]]</x>"))
    assert "<y> at 0" in str(grammar.check("<y>[1]</y>"))
    assert "not JSON" in str(grammar.check("<x>[1,"))
    assert "no </x> follows" in str(grammar.check("<x>[] </x>"))
    strict = build_grammar(compile_spec(Structural([("<y>", pair, "</y>")], lenient=True), BYTES), BYTES)
    assert strict.unchecked == ()
    assert strict.check("<y>[1]</y>") is None, "what the masks hold is not checked again"


@pytest.mark.parametrize("name", EXPENSIVE_SPECS)
def test_bombs_are_compiled_or_refused_in_time(small: Vocabulary, name: str) -> None:
    compile_grammar(Regex("warm"), small)
    begun, reason = monotonic(), ""
    try:
        compile_grammar(EXPENSIVE_SPECS[name](), small)
    except GrammarError as error:
        reason = str(error)
    assert len(reason) < 500
    assert monotonic() - begun < 30  # the child's limit is 2 s; this machine may be busy
