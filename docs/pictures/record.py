"""Writes docs/pictures/data.json: what the programs of the pages do on the embedded model, for make_pictures.py.

    python docs/pictures/record.py

Run it when a program on one of the pages changes; the pictures can be made again from the file without a model.
"""

from __future__ import annotations

import json
import re
import runpy
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import plait
from plait import assistant, gen, system, user
from plait.constrained import JsonSchema, compile_grammar, mask_words
from plait.lang.spans.call_spans import trace_of
from plait.runtime.kv_cache.radix_node import RadixNode

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
REVIEW = {
    "type": "object",
    "properties": {
        "product": {"enum": ["shoes", "hat", "coat"]},
        "tone": {"type": "string", "maxLength": 12},
        "stars": {"enum": [1, 2, 3, 4, 5]},
    },
    "required": ["product", "tone", "stars"],
    "additionalProperties": False,
}


def main() -> None:
    data: dict[str, Any] = {}
    with plait.Engine() as engine:
        plait.set_default_backend(engine)
        data["review"] = _review(_names_of("README.md", 0, 1))
        data["agent"] = _calls(_names_of("docs/tutorial.md", 0, 6)["state"])
        data["batch"] = _batch()
        data["mask"] = _mask(engine)
    data["cache"] = _cache()
    (FOLDER / "data.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _names_of(page: str, first: int, last: int) -> dict[str, Any]:
    """Runs Python blocks of a page as one script and returns its names."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "page.py"
        script.write_text("\n".join(blocks[first:last]))
        return runpy.run_path(str(script))


def _calls(state: plait.ProgramState) -> dict[str, Any]:
    """The calls of a program and its usage; times are rounded to milliseconds."""
    trace = trace_of(state._run)
    spans = [
        {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(span).items()}
        for span in trace.spans
    ]
    return {"parents": trace.branch_parents, "spans": spans, "usage": str(state.usage)}


def _review(names: dict[str, Any]) -> dict[str, Any]:
    state = names["review"].run("Great shoes, but they cost too much.", temperature=0)  # the model is warm
    plait.flush_cache()
    state = names["review"].run("Great shoes, but they cost too much.", temperature=0)
    return _calls(state) | {"messages": state.messages(), "variables": state.variables}


def _batch() -> list[list[int]]:
    """Cached and computed tokens of 32 items whose prompts differ at their end only."""
    manual = " ".join(f"Rule {number}: a parcel of kind {number} is sent on day {number}." for number in range(29))

    @plait.function
    def answer(s: plait.ProgramState, kind: int) -> None:
        s += user(f"{manual}\nOn which day is kind {kind:02} sent?") + assistant(gen("day", max_tokens=4))

    plait.flush_cache()
    states = answer.run_batch([{"kind": kind} for kind in range(32)], temperature=0)
    return [[state.usage.cached_tokens, state.usage.computed_tokens] for state in states]


def _mask(engine: plait.Engine) -> list[dict[str, Any]]:
    """The tokens of a value, with how many tokens the schema allowed at each, and some of them."""

    @plait.function
    def fill(s: plait.ProgramState) -> None:
        s += user("Great shoes, they last for years! Fill in the form.")
        s += assistant(gen("review", json_schema=REVIEW))

    text = fill.run(temperature=0).text_of("review")
    vocabulary = engine.client.tokenizer.vocabulary
    grammar = compile_grammar(JsonSchema(REVIEW), vocabulary)
    matcher, row, tokens = grammar.matcher(), np.zeros(mask_words(len(vocabulary)), np.int32), []
    forced_left = 0
    for token in vocabulary.encode(text):
        if not forced_left:
            forced_left = len(matcher.forced_tokens())
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        shown = sorted({vocabulary.token_bytes[i].decode(errors="replace") for i in allowed[:4000]}, key=len)[::-1]
        tokens.append(
            {
                "text": vocabulary.token_bytes[token].decode(),
                "allowed": len(allowed),
                "examples": shown[:5],
                "is_forced": forced_left > 0,
            }
        )
        forced_left = max(0, forced_left - 1)
        assert matcher.accept(token)
    return tokens


def _cache() -> list[list[dict[str, Any]]]:
    """The radix tree of a small cache: after a program with three branches, and after another one that needed room."""

    @plait.function
    def plan(s: plait.ProgramState, city: str) -> None:
        s += system("You plan trips.") + user(f"I have one day in {city}.")
        branches = s.fork(3)
        for branch, topic in zip(branches, ["food", "museums", "parks"], strict=True):
            branch += user(f"Something about {topic}.") + assistant(gen("idea", max_tokens=12))
        branches.join()

    trees = []
    with plait.Engine(max_pages=110) as engine:
        for city in ("Rome", "Paris"):
            plan.run(city, temperature=0, backend=engine)
            engine.client.status()
            tree = engine.engine_loop.cache.tree
            trees.append(
                [node for root in tree._roots.values() for node in _nodes(root, engine.client.tokenizer.vocabulary, 0)]
            )
    return trees


def _nodes(node: RadixNode, vocabulary: Any, depth: int) -> list[dict[str, Any]]:
    """The node and those below it, in the order of a walk."""
    text = b"".join(vocabulary.token_bytes[token] for token in node.key).decode(errors="replace")
    found = [{"depth": depth, "tokens": len(node.key), "text": text}] if node.parent is not None else []
    for child in node.children.values():
        found += _nodes(child, vocabulary, depth + (node.parent is not None))
    return found


if __name__ == "__main__":
    main()
