"""The programs that benchmarks/programs.py runs: those of examples/, each with more work than the example gives it.

Knows: the examples' programs and their arguments. Must not know: what runs them, clocks.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plait
from plait import gen

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = Path(__file__).parents[2] / "docs"
Work = Callable[[Any], list[plait.ProgramState]]


def workloads(size: int) -> dict[str, Work]:
    """Name and work; `work(backend)` runs it and gives the states. `size` scales the number of items."""
    example = {name: runpy.run_path(str(EXAMPLES / f"{name}.py")) for name in _NAMES}
    batch = _batches(example, size)
    many: dict[str, Work] = {
        name: lambda backend, program=program, items=items: program.run_batch(items, temperature=0, backend=backend)
        for name, (program, items) in batch.items()
    }
    return many | {
        "nothing shared": lambda backend: _alone.run_batch(_unrelated(2 * size), temperature=0, backend=backend)
    }


_NAMES = (
    *("multiple_choice", "endings", "react", "generative_agents", "tree_of_thought", "skeleton_of_thought"),
    *("judge", "extraction", "conversation", "rag"),
)


def _batches(example: dict[str, dict[str, Any]], size: int) -> dict[str, tuple[plait.Program, list[dict[str, Any]]]]:
    towns = ["Paris", "Rome", "Berlin"]
    sums = [(f"What is {a} plus {b}?", [str(a + b + k) for k in range(4)]) for a, b in _pairs(4 * size)]
    stories = example["endings"]["STORIES"]
    people = example["generative_agents"]["VILLAGE"]
    essay, documents = example["judge"]["ESSAY"], example["extraction"]["DOCUMENTS"]
    pieces = list(example["rag"]["chunks"](DOCS))
    excerpts = {name: text for name, text in pieces if name.startswith(("tools", "control"))}
    asked = [(f"{question} ({i})", list(excerpts)) for i in range(size) for question in example["rag"]["QUESTIONS"]]
    return {
        "multiple choice": (example["multiple_choice"]["answer"], [{"question": q, "options": o} for q, o in sums]),
        "endings": (example["endings"]["finish"], [{"context": c, "endings": e} for c, e in stories]),
        "react": (
            example["react"]["agent"],
            [
                {"question": f"Do more people live in {a} or in {b}?", "max_steps": 1}
                for a in towns
                for b in towns
                if a < b
            ],
        ),
        "agents": (example["generative_agents"]["step"], [{"person": p, "memories": m} for p, m in people.items()]),
        "tree of thought": (
            example["tree_of_thought"]["solve"],
            [{"question": example["tree_of_thought"]["QUESTION"]}],
        ),
        "skeleton": (example["skeleton_of_thought"]["answer"], [{"question": f"How do I {what}?"} for what in _HOW]),
        "judge": (example["judge"]["judge"], [{"essay": f"Essay {i + 1}. {essay}"} for i in range(size // 2)]),
        "extraction": (example["extraction"]["extract"], [{"document": document} for document in documents]),
        "chat": (example["conversation"]["talk"], [{"questions": [*example["conversation"]["QUESTIONS"], "Why?"]}]),
        "rag": (example["rag"]["answer"], [{"excerpts": excerpts, "questions": asked[: 2 * size]}]),
    }


_HOW = ["stay healthy", "learn to swim", "bake bread"]


def _pairs(count: int) -> list[tuple[int, int]]:
    draw = random.Random(5)
    return [(draw.randrange(10, 99), draw.randrange(10, 99)) for _ in range(count)]


@plait.function
def _alone(s: plait.ProgramState, text: str) -> None:
    s += text + gen("more", max_tokens=16)


def _unrelated(count: int) -> list[dict[str, Any]]:
    """Texts of which no two begin alike."""
    draw = random.Random(7)
    words = ["river", "stone", "cloud", "paper", "green", "seven", "music", "table", "light", "north", "bread", "glass"]
    return [{"text": f"{i} " + " ".join(draw.choice(words) for _ in range(150))} for i in range(count)]
