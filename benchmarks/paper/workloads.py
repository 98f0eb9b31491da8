"""The programs that benchmarks/paper_programs.py runs: those of examples/, each for several users at once."""

from __future__ import annotations

import itertools
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plait
from plait import gen

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = Path(__file__).parents[2] / "docs"
ALONE = "nothing shared"
UNSHARED = ("endings", ALONE)  # no two texts of these have a common prefix
Work = Callable[[Any], list[plait.ProgramState]]
Items = list[dict[str, Any]]
_NAMES = (
    *("multiple_choice", "endings", "react", "generative_agents", "tree_of_thought", "skeleton_of_thought"),
    *("judge", "extraction", "conversation", "rag"),
)
_HOW = ["stay healthy", "learn to swim", "bake bread", "grow roses", "save money", "fix a bike", "read more", "sleep"]
_FIRST = ["What is a volcano?", "What is a river?", "What is a desert?", "What is an island?"]


def workloads(size: int) -> dict[str, Work]:
    """Returns the workloads by name; `work(backend)` runs one and returns its states. `size` scales users and items."""
    example = {name: runpy.run_path(str(EXAMPLES / f"{name}.py")) for name in _NAMES}
    items_of_program: dict[str, tuple[plait.Program, Items]] = {
        "multiple choice": (example["multiple_choice"]["answer"], _sums(4 * size)),
        "endings": (example["endings"]["finish"], _stories(example["endings"]["STORIES"], 2 * size)),
        "react": (example["react"]["agent"], _comparisons(size)),
        "agents": (example["generative_agents"]["step"], _people(example["generative_agents"]["VILLAGE"], size)),
        "tree of thought": (example["tree_of_thought"]["write"], _tales(example["tree_of_thought"]["END"], size // 2)),
        "skeleton": (example["skeleton_of_thought"]["answer"], [{"question": q} for q in _turned(_HOW, size)]),
        "judge": (example["judge"]["judge"], _essays(example["judge"]["ESSAY"], size)),
        "extraction": (example["extraction"]["extract"], _invoices(2 * size)),
        "chat": (example["conversation"]["talk"], _chats(example["conversation"]["QUESTIONS"], size)),
        "rag": (example["rag"]["answer"], _questions(example["rag"], 2 * size)),
        ALONE: (_alone, _unrelated(2 * size)),
    }

    def work(program: plait.Program, items: Items) -> Work:
        return lambda backend: program.run_batch(items, temperature=0, backend=backend)

    return {name: work(program, items) for name, (program, items) in items_of_program.items()}


def _sums(count: int) -> Items:
    draw = random.Random(5)
    pairs = [(draw.randrange(10, 99), draw.randrange(10, 99)) for _ in range(count)]
    return [{"question": f"What is {a} plus {b}?", "options": [str(a + b + k) for k in range(4)]} for a, b in pairs]


def _stories(stories: list[tuple[str, list[str]]], count: int) -> Items:
    repeated = itertools.islice(itertools.cycle(stories), count)
    return [
        {"context": f"{number}. {context}", "endings": endings} for number, (context, endings) in enumerate(repeated)
    ]


def _comparisons(count: int) -> Items:
    pairs = itertools.islice(itertools.cycle(itertools.permutations(["Paris", "Rome", "Berlin"], 2)), count)
    return [{"question": f"Do more people live in {a} or in {b}?", "max_steps": 2} for a, b in pairs]


def _people(village: dict[str, list[str]], count: int) -> Items:
    repeated = itertools.islice(itertools.cycle(village.items()), count)
    return [{"person": who, "memories": [*what, f"counted {n + 3} birds"]} for n, (who, what) in enumerate(repeated)]


def _tales(end: str, count: int) -> Items:
    topics = itertools.islice(itertools.cycle(["a boy who finds an old boat", "a girl and a river", "a storm"]), count)
    return [{"topic": topic, "end": end} for topic in topics]


def _turned(what: list[str], count: int) -> list[str]:
    return [f"How do I {task}?" for task in itertools.islice(itertools.cycle(what), count)]


def _essays(essay: str, count: int) -> Items:
    return [{"essay": f"Essay {number + 1}. {essay}"} for number in range(count)]


def _invoices(count: int) -> Items:
    template = "Invoice {} from Miller & Sons, {} May 2023. {} chairs. Total: 179 euros. Payable within 30 days."
    return [{"document": template.format(4711 + number, number + 1, number + 2)} for number in range(count)]


def _chats(questions: list[str], count: int) -> Items:
    first_questions = itertools.islice(itertools.cycle(_FIRST), count)
    return [{"questions": [first, *questions[1:], "Why?"]} for first in first_questions]


def _questions(rag: dict[str, Any], count: int) -> Items:
    """Returns one item, whose program asks about the same excerpts in each branch."""
    excerpts = {name: text for name, text in rag["chunks"](DOCS) if name.startswith(("tools", "control"))}
    repeated = itertools.islice(itertools.cycle(rag["QUESTIONS"]), count)
    questions = [(f"{question} ({number})", list(excerpts)) for number, question in enumerate(repeated)]
    return [{"excerpts": excerpts, "questions": questions}]


@plait.function
def _alone(s: plait.ProgramState, text: str) -> None:
    s += text + gen("more", max_tokens=16)


def _unrelated(count: int) -> Items:
    """Returns texts of which no two have a common prefix."""
    draw = random.Random(7)
    words = ["river", "stone", "cloud", "paper", "green", "seven", "music", "table", "light", "north", "bread", "glass"]
    return [{"text": f"{number} " + " ".join(draw.choice(words) for _ in range(150))} for number in range(count)]
