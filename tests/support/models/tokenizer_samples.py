"""Texts, and tokens that are ordinary text, for the tests of tokenizers."""

from __future__ import annotations

import re

from hypothesis import strategies as st
from tokenizers import pre_tokenizers

DIGITS_THEN_BYTES = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
CONTROL_TOKEN = re.compile(r"<\|?[a-z_]+\|?>")  # of SmolLM2
TEXT = st.text(
    st.one_of(
        st.sampled_from("abcXYZ  \n\t\r.,'’01239é漢🙂²Ⅷ١\u00a0\u200b{}()<|>_"),
        st.characters(exclude_categories=("Cs",)),
    ),
    max_size=60,
).filter(lambda text: not CONTROL_TOKEN.search(text))  # hypothesis also tries the strings of this project's source
SAMPLES = [
    "Hello world",
    "  two  spaces\n\n\n tabs\t\t x ",
    "12345 ٣٤٥ ½ Ⅷ ² 1,234.5",
    "naïve café 漢字かな 🤦🏽‍♂️ 🇫🇷",
    "def f(x):\n    return x**2  # ok\r\n",
    "can't won't I'LL we've",
    "a" * 200,
    " " * 100,
]
PLAIN_TEXT_TOKENS = ["\n", "\n\n", "\n\n\n", "  ", "   ", "\t", "<b>", "</b>", "<table>"]
