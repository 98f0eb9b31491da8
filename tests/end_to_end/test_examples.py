"""Every example runs on the embedded model with the output that docs/examples.md shows."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXPECTED_OUTPUT = {
    "quickstart": ["capital: ", "tip: ", "came from the prefix cache"],
    "multiple_choice": [r"What is the capital of France\? Paris", r"\d of 5 right", "came from the cache"],
    "endings": ["he flips the pancake.", "glides across the rink."],
    "react": [r"population\(.*Paris.*\) -> 2100", r"\d thousand people live", "forced by the tools' schemas"],
    "extraction": [r"Miller & Sons: \d+ items, 179 ", r"Blue Lamp Ltd: \d+ items, 240 ", "forced"],
    "nested_extraction": [
        r"John Wood, Bristol, pays by (?:card|cash|transfer)\n  \d+ x ",
        r"Anna Bell, York, pays by ",
    ],
    "judge": [r"[1-5]: the clarity is .+\.", r"In all: \d\.\d\. .+"],
    "generative_agents": [
        r"Ada, the baker, goes to the (bakery|library|park|market) and is there ",
        r"\d\.\d+ sold all her bread today, \d\.\d+ wants to learn about rye flour",
    ],
    "tree_of_thought": [
        "And so the old boat sailed again",
        r"mean logprob of the end: \(-\d\.\d+, -\d\.\d+\)",
        "24 calls",
    ],
    "skeleton_of_thought": [r"3\. [A-Z][a-z ]*: ", "on 3 branches side by side"],
    "conversation": ["> What is a volcano\\?", "7 messages", r"\(\d+ prompt tokens computed, [1-9]\d* from the cache"],
    "rag": [r" \[[a-z-]+\.md:\d+\]", r"\d+ of \d+ prompt tokens came from the cache"],
}


@pytest.fixture
def default_backend(runtime):
    plait.set_default_backend(runtime)
    yield
    plait.set_default_backend(None)


@pytest.mark.parametrize("name", [name for name in EXPECTED_OUTPUT if name != "rag"])
def test_an_example_prints_the_expected_output(default_backend, name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    for expected in EXPECTED_OUTPUT[name]:
        assert re.search(expected, output), (expected, output)


def test_rag_finds_the_nearest_chunks_cites_them_and_shares_the_prefix(default_backend, capsys, tmp_path):
    """Over three pages; compares the search with an exhaustive one."""
    import numpy as np

    for page in ("tools.md", "async.md", "control.md"):
        shutil.copy(ROOT / "docs" / page, tmp_path)
    rag = runpy.run_path(str(EXAMPLES / "rag.py"), run_name="example")
    chunks = list(rag["chunks"](tmp_path))
    index = rag["Index"](chunks, rag["Embedder"]())
    question = rag["QUESTIONS"][1]
    vectors = [np.frombuffer(vector, np.float32) for vector in index.embed([question, *(text for _, text in chunks)])]
    similarities = np.stack(vectors[1:]) @ vectors[0]
    nearest = [chunks[i][0] for i in np.argsort(-similarities)[:3]]
    results = index.search(question, 3)
    assert [name for name, *_ in results] == nearest and nearest[0].startswith("tools.md:")
    np.testing.assert_allclose(
        [1 - distance for *_, distance in results], sorted(similarities, reverse=True)[:3], atol=1e-5
    )

    state = rag["answer"].run(
        {name: text for name, text, _ in results[:2]}, [(question, nearest[:2])] * 2, temperature=0
    )
    assert all(source in [f"[{name}]" for name in nearest[:2]] for source in state["source"])
    usage = state.usage
    assert usage.cached_tokens > usage.computed_tokens > 0, "the excerpts must be computed once for all questions"


def test_every_example_is_short_and_shown_on_the_page_with_its_output():
    page = (ROOT / "docs" / "examples.md").read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(EXPECTED_OUTPUT)
    for name in names:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 120, name
        section = page.partition(f"](../examples/{name}.py)")[2].partition("\n## ")[0]
        for expected in EXPECTED_OUTPUT[name]:
            assert re.search(expected, section), (name, expected)
