"""Texts, and tokens that are ordinary text, for the tests of tokenizers."""

from __future__ import annotations

import re

import pytest
from fast_gguf_reader import Reader
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from plait.runtime.model_files.locate import locate_model

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


def smollm2_in_transformers():
    """The embedded model's tokenizer in transformers, which ignores the file's `pre`: the published one's is set."""
    from transformers import AutoTokenizer  # a second, which tests that only take the samples save

    path = locate_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf.GGUFReader", Reader)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = DIGITS_THEN_BYTES
    return tokenizer
