"""Bodies whose control flow depends on a value known only at run time: `compile()` refuses them."""

from __future__ import annotations

import json
import re

import pytest
from compiled_programs import compile_body

import plait
from plait import gen, race, select


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s, a: 1 if s["x"] else 2, r"depends on s\['x'\], .*: it is used as a condition"),
        (lambda s, a: s["x"] == "yes", "it is compared with 'yes'"),
        (lambda s, a: s["x"] == "yes", r"\(at .*test_value_dependence.py:\d+\)"),
        (lambda s, a: s["x"].lower() != "yes", r"depends on s\['x'\]\.lower\(\)"),
        (lambda s, a: s["x"] in ("yes", "no"), "is compared with 'yes'"),
        (lambda s, a: s["x"] in {"yes": 1}, "looked up in a dict"),
        (lambda s, a: "y" in s["x"], "searched with in"),
        (lambda s, a: s["x"] in "yes no", "where a known value is needed"),
        (lambda s, a: len(s["x"]), "measured with len"),
        (lambda s, a: list(s["x"]), "iterated over"),
        (lambda s, a: int(s["x"]), "converted to a number"),
        (lambda s, a: range(s["x"]), "used as a count or an index"),
        (lambda s, a: re.match("a", s["x"]), "where a known value is needed"),
        (lambda s, a: ", ".join([s["x"]]), r"is used .* needed: .*; inside a text write f'\{value\}'"),
        (lambda s, a: json.loads(s["x"]), "where a known value is needed"),
        (lambda s, a: json.loads(f"{s['x']}"), None),
        (lambda s, a: int(f"{s['x']}"), r"known value is needed: .*\{s\['x'\]\}"),
        (lambda s, a: s.__iadd__(f"Is it {s['x']}"[:9]), "was cut, stripped, split"),
        (lambda s, a: s.__iadd__(f"Is it {s['x']}".strip()), "was cut, stripped, split"),
        (lambda s, a: s.__iadd__(f"Is it {s['x']}".upper()), "was cut, stripped, split"),
        (lambda s, a: [s.__iadd__(word) for word in f"Is it {s['x']}?".split()], "was cut, stripped, split"),
        (lambda s, a: [s.__iadd__(item) for item in a], r"depends on a, .*; give it to compile: compile\(a=\.\.\.\)"),
        (lambda s, a: s.__iadd__(select("c", a)), "it is iterated over; give it"),
        (lambda s, a: s.__iadd__(gen("c", max_tokens=a)), "known value is needed: .*max_tokens"),
        (lambda s, a: s.fork(a), "known value is needed: fork takes a number"),
        (lambda s, a: a > 3, r"it is compared with 3; give it to compile: compile\(a=\.\.\.\)"),
        (lambda s, a: s.text() == "", "depends on the text of s"),
        (lambda s, a: s.usage.calls > 3, r"depends on the usage of s\.calls"),
        (lambda s, a: race(s.fork(2))[0], "which branch wins a race"),
    ],
)
def test_use_of_a_runtime_value_is_refused(use, message):
    def body(s, a):
        s += "p" + gen("x")
        use(s, a)

    with pytest.raises(plait.CompileError if message is None else plait.DependsOnValue, match=message) as caught:
        compile_body(body)
    assert caught.value.place.filename == __file__


def test_refusal_cannot_be_caught_by_the_body():
    def body(s):
        s += "p" + gen("x")
        try:
            s += "yes" if s["x"] == "a" else "no"
        except Exception:
            s += "no"

    with pytest.raises(plait.DependsOnValue, match="compared with 'a'"):
        compile_body(body)


def test_text_that_looks_like_a_placeholder_is_kept():
    graph = compile_body(lambda s: s.__iadd__("NotKnown aZ0 " + gen("x")))
    assert '"NotKnown aZ0 "' in str(graph)
