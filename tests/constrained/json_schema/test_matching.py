"""Plain patterns are matched by Rust's regex as by Python's."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from plait.constrained.json_schema.rewrite.patterns.operations import matches_whole

ATOMS = [
    r"\U0000002e",
    "a",
    r"[\U00000000-\U0000d7ff\U0000e000-\U0010ffff]",
    r"[^\U00000061]",
    r"[^\U00000000-\U0010ffff]",
]
ATOMS += [r"[\U00000061-\U0000007a\U000000e9]", r"\U0001f600", "(?:)"]
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda arms: f"(?:{'|'.join(arms)})"),
        st.tuples(inner, st.sampled_from(["{0,}", "{0,1}", "{2,3}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
TEXTS = st.text(st.sampled_from("ab.\n\r\0 \u2028\u00e9\u4e00\U0001f600\U0010ffff\ud800"), max_size=4)


@given(PATTERNS, TEXTS)
@example("a", "a\n")
@example("a{0,}", "\ud800")
@example(r"(?:(?:[\U00000000-\U0010ffff]){1,100}){1,100}", "aé")  # larger than Rust's regex takes
def test_patterns_match_as_in_python(plain, text):
    assert matches_whole(f"^(?:{plain})$", text) == (re.fullmatch(plain, text) is not None)
