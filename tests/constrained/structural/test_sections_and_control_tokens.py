"""Openers, sections of calls, control tokens, ids of calls, and contents that are patterns and grammars."""

from __future__ import annotations

import random

import pytest
from byte_grammars import accepts, refusal
from matchers import allowed_tokens, compile_in_process

from plait.constrained import GrammarError, JsonSchema, Lark, Regex, Structural, Vocabulary
from plait.constrained.compiler import compile_spec
from plait.constrained.specs import Elements, Trigger

BEGIN, END, CALL = 257, 258, 259  # control tokens, which have no bytes
VOCABULARY = Vocabulary(
    (b"", *(bytes([byte]) for byte in range(256)), b"", b"", b"", b'": '),
    (0,),
    lambda text: [1 + b for b in text.encode()],
)
INTEGER = {"type": "integer"}
TWO = [
    Trigger('{"name": "f", "arguments": ', INTEGER, "}"),
    Trigger('{"name": "fg", "arguments": ', {"type": "null"}, "}"),
]


def tokens_of(*parts: str | int) -> list[int]:
    return [token for part in parts for token in ([part] if isinstance(part, int) else VOCABULARY.encode(part))]


def takes(spec: Structural, *parts: str | int) -> bool:
    matcher = compile_in_process(spec, VOCABULARY).matcher()
    return all(map(matcher.accept, tokens_of(*parts))) and matcher.is_accepting


def test_an_opener_commits_to_a_call() -> None:
    spec = Structural([(f"<c>\n{call.begin}", call.content, "}\n</c>") for call in TWO], openers=["<c>"])
    call = '<c>\n{"name": "f", "arguments": 1}\n</c>'
    assert (
        accepts(spec, call, f"a {call} b {call}", '<c>\n{"name": "fg", "arguments": null}\n</c>', "<c", "")
        == [True] * 5
    )
    assert not any(accepts(spec, "<c>", "a <c> b", call[:-1], f"{call}<c>", '<c>{"name": "f", "arguments": 1}\n</c>'))


def test_a_section_stands_once() -> None:
    spec = Structural(TWO, begin="[", separator=", ", end="]", openers=["[{"])
    f, g = '{"name": "f", "arguments": 1}', '{"name": "fg", "arguments": null}'
    assert all(accepts(spec, "", "[", f"[{f}]", f"a [{g}, {f}, {f}] b [", f"[[{f}]"))
    assert not any(accepts(spec, f"[{f}", f"[{f},{g}]", f"[{f}] [{g}]", "[{", f"[{f}, ]"))
    counted = Structural(TWO, begin="[", separator=", ", end="]", at_least=2, at_most=3, free_text=False)
    assert accepts(counted, f"[{f}]", f"[{f}, {g}]", f"[{g}, {g}, {g}]", f"[{f}, {f}, {f}, {f}]", "") == [0, 1, 1, 0, 0]
    optional = Structural(TWO, begin="[", end="]", free_text=False)
    assert accepts(optional, "", f"[{f}]", f"[{f}{g}]", "[]") == [True, True, True, False]


def test_a_section_without_an_end_is_longest() -> None:
    spec = Structural([("<c>", INTEGER, "</c>")], separator="\n")
    assert all(accepts(spec, "a<c>1</c>\n<c>2</c>", "<c>1</c>\nb", "<c>1</c>b", "<c>1</c>\n<", "b"))
    assert not any(accepts(spec, "<c>1</c>\n<c>", "<c>1</c> <c>2</c>", "<c>1</c>\n<c>x</c>"))


def test_control_tokens_are_not_their_text() -> None:
    marks = {"control_tokens": [("[CALL]", CALL), ("[/CALL]", END)], "openers": ["[CALL]"]}
    spec = Structural([("[CALL]f", INTEGER, "[/CALL]")], **marks)
    assert takes(spec, "a", CALL, "f12", END, " [CALL] b", CALL, "f3", END)
    assert takes(spec, "[CALL]f[/CALL]"), "the text of a control token is text"
    assert not takes(spec, CALL, "f12[/CALL]") and not takes(spec, CALL, "g1", END) and not takes(spec, END)


def test_a_section_of_control_tokens() -> None:
    marks = {"control_tokens": [("<s>", BEGIN), ("</s>", END), ("<c>", CALL)], "begin": "\n<s>", "end": "</s>"}
    spec = Structural([("<c>f", INTEGER, ""), ("<c>g", INTEGER, "")], at_most=2, openers=["\n<s>"], **marks)
    assert takes(spec, "a\n", BEGIN, CALL, "f1", CALL, "g2", END, " b") and takes(spec, "\n\n", BEGIN, CALL, "g1", END)
    assert takes(spec, "\n") and takes(spec, "")
    assert not takes(spec, "a", BEGIN, CALL, "f1", END) and not takes(spec, "\n", BEGIN, CALL, "f1", END, "\n", BEGIN)
    assert not takes(spec, "\n", BEGIN, CALL, "f1", CALL, "f1", CALL, "f1", END)


def test_control_tokens_are_forced_and_completed() -> None:
    elements = Elements({"properties": {"a": {"type": "string"}}, "required": ["a"]}, "<k>{name}<v>", "</v>")
    marks = [("<s>", BEGIN), ("</v>", END), ("</s>", CALL)]
    spec = Structural([Trigger("<s>f", elements, "</s>")], control_tokens=marks, free_text=False, at_least=1, at_most=1)
    matcher = compile_in_process(spec, VOCABULARY).matcher()
    assert matcher.forced_tokens() == tokens_of(BEGIN, "f<k>a<v>") and matcher.forced_bytes() == b""
    assert all(map(matcher.accept, tokens_of(BEGIN, "f<k>a<v>", "any </v> text")))
    assert matcher.completion(20) == [END, CALL]
    matcher.rollback(5)
    assert all(map(matcher.accept, [END, CALL])) and matcher.is_accepting


def test_masks_have_a_control_token_only_where_it_may_stand() -> None:
    spec = Structural([("<s>f", INTEGER, "</s>")], control_tokens=[("<s>", BEGIN), ("</s>", END)])
    rng, grammar = random.Random(3), compile_in_process(spec, VOCABULARY)
    for _ in range(30):
        matcher, is_open = grammar.matcher(), False
        for _ in range(20):
            allowed = allowed_tokens(matcher, VOCABULARY)
            assert (BEGIN in allowed) <= (not is_open) and (END in allowed) <= is_open and CALL not in allowed
            token = rng.choice([t for t in allowed if t >= 256 or t == 0] or allowed)
            assert matcher.accept(token)
            is_open = token == BEGIN or (is_open and token != END)


def test_unique_items_and_digits_behind_control_tokens() -> None:
    unique = {"type": "array", "uniqueItems": True, "items": INTEGER}
    spec = Structural([("<s>", unique, "</s>")], control_tokens=[("<s>", BEGIN), ("</s>", END)])
    assert takes(spec, "<s>[1, 1]", BEGIN, "[1, 2]", END, " 1, 1 ", BEGIN, "[2, 1]", END)
    assert not takes(spec, BEGIN, "[1, 1]", END) and not takes(spec, BEGIN, "[1]", END, BEGIN, "[2, 2]", END)
    assert takes(spec, BEGIN, f"[{'1' * 23}]", END) and not takes(spec, BEGIN, f"[{'1' * 24}]", END)
    assert takes(spec, "1" * 50)


@pytest.mark.parametrize("token", [1, 0, 400])
def test_other_tokens_are_no_control_tokens(token: int) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_spec(Structural([("<s>", {}, "</s>")], control_tokens=[("<s>", token)]), VOCABULARY)
    assert caught.value.where == "/control_tokens/0"


def test_ids_of_calls() -> None:
    mistral = Structural([("[C]f[ID]{id}[A]", INTEGER, "")], openers=["[C]"], call_id="[a-z0-9]{3}", at_most=1)
    assert accepts(mistral, "[C]f[ID]a1b[A]5", "x[C]f[ID]abc[A]12", "[C]f[ID]ab[A]5", "[C]f[ID]{id}[A]5") == [
        1,
        1,
        0,
        0,
    ]
    listed = Structural([('{"f": ', INTEGER, ', "id": "{id}"}')], call_id="[0-9]+", free_text=False, at_least=1)
    assert accepts(listed, '{"f": 1, "id": "23"}', '{"f": 1, "id": ""}') == [True, False]
    with pytest.raises(GrammarError, match="call_id is a sequence"):
        Structural([("<c>", {}, "</c>")], call_id=".*")


def test_a_pattern_does_not_contain_its_end() -> None:
    spec = Structural([("<c>", Regex("[a<>/c]*"), "</c>")], at_most=1)
    assert all(accepts(spec, "<c></c>", "<c>a<c></c>", "<c>a</c></c>", "<c>a</c> b"))
    assert not any(accepts(spec, "<c>b</c>", "<c>a</c", "<c>a</c><c>"))
    assert refusal(Structural([("<c>", Regex(r"a(?=b)"), "</c>")])).where == "/triggers/0/content"


def test_a_grammar_is_a_content() -> None:
    patch = 'start: "begin\\n" line+ "end"\nline: "+" /[^\\n]*/ "\\n"'
    spec = Structural([("<c>", Lark(patch), "</c>"), ("<d>", INTEGER, "</d>")])
    assert all(accepts(spec, "<c>begin\n+a\n+b c\nend</c> x", "<d>1</d><c>begin\n+<d>\nend</c>"))
    assert not any(accepts(spec, "<c>begin\nend</c>", "<c>begin\n+a\nend", "<d>begin\n+a\nend</d>"))
    assert refusal(Structural([("<c>", Lark("start: missing"), "</c>")])).where == "/triggers/0/content"
    assert refusal(Structural([("<c>", Lark('start: %json {"type": 1}'), "</c>")])).where == "/triggers/0/content"


def test_each_content_has_its_style() -> None:
    pair = {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    spec = Structural([("<c>", JsonSchema(pair, compact=True), "</c>"), ("<d>", pair, "</d>")], free_text=False)
    texts = ['<c>{"a":1,"b":2}</c>', '<c>{"a": 1, "b": 2}</c>', '<d>{"a": 1, "b": 2}</d>', '<d>{"a":1,"b":2}</d>']
    assert accepts(spec, *texts) == [True, False, True, False]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Structural(TWO, openers=["["]), 0),
        (lambda: Structural(TWO, openers=['{"name', '{"name": "f']), 1),
        (lambda: Structural(TWO, openers=[""]), 0),
        (lambda: Structural(TWO, openers="["), None),
        (lambda: Structural([("<c>", {}, "</c>"), ("<c>d", {}, "</c>")], openers=["<c>"]), 1),
        (lambda: Structural([("<c>", Regex("a"), "")]), 0),
        (lambda: Structural(TWO, begin="x" * 1025), None),
        (lambda: Structural(TWO, control_tokens=[("<s>", -1)]), 0),
        (lambda: Structural(TWO, control_tokens=[("<s>", 1), ("<s>", 2)]), 1),
        (lambda: Structural(TWO, control_tokens=[("", 1)]), 0),
    ],
)
def test_invalid_arguments_raise_when_the_spec_is_made(make: object, where: int | None) -> None:
    with pytest.raises(GrammarError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.where == where


@pytest.mark.parametrize("content", [{"type": "object"}, Elements({"type": "object"}, "<p={name}>", "</p>")])
def test_a_section_whose_end_begins_like_another_call_is_completed(content: object) -> None:
    """However far it has come: its end and another call begin alike."""
    spec = Structural(
        [Trigger("<call f>", content, "</call>"), Trigger("<call g>", content, "</call>")],
        **{"at_least": 1, "free_text": False, "begin": "<calls>\n", "separator": "\n", "end": "\n</calls>"},
    )
    grammar, written = compile_in_process(spec, VOCABULARY), b"<calls>\n<call f>"
    for size in range(len(written) + 1):
        matcher = grammar.matcher()
        assert all(matcher.accept(1 + byte) for byte in written[:size])
        completion = matcher.completion(200)
        assert completion is not None and all(map(matcher.accept, completion)) and matcher.is_accepting
