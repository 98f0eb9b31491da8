"""A judge with one branch per criterion: the branches grade one essay in parallel, then the judge sums up."""

from __future__ import annotations

from typing import Literal

import plait
from plait import assistant, gen, system, user

CRITERIA = ["clarity", "originality", "evidence"]
ESSAY = (
    "Cities should plant more trees. Trees cool the streets in summer, clean the air, and make people happier. A study "
    "in Toronto found that ten more trees on a block improve how healthy people feel."
)


@plait.function
def judge(s, essay):
    s += system("You judge essays fairly.") + user(f"Here is an essay.\n\n{essay}")

    def ask(branch, criterion):
        branch += user(f"How is the essay's {criterion}? Answer in one sentence.")
        branch += assistant(f"The {criterion} of the essay is" + gen("opinion", max_tokens=32, stop=["\n", "."]) + ".")
        branch += user("From 1 (bad) to 5 (very good), which grade do you give for that?")
        branch += assistant("I give it a " + gen("grade", type=Literal[1, 2, 3, 4, 5]) + ".")

    plait.map(s, CRITERIA, ask)  # the essay is computed once, the criteria in parallel
    grades = ", ".join(f"{criterion} {grade}" for criterion, grade in zip(CRITERIA, s["grade"], strict=True))
    s += user(f"The grades are: {grades}. Sum up in one sentence.")
    s += assistant(gen("summary", max_tokens=40, stop=["\n", "."]) + ".")


def main() -> None:
    state = judge.run(ESSAY, temperature=0)
    for criterion, grade, opinion in zip(CRITERIA, state["grade"], state["opinion"], strict=True):
        print(f"{grade}: the {criterion} is{opinion}.")
    print(f"In all: {sum(state['grade']) / len(CRITERIA):.1f}. {state['summary'].strip()}.")
    print(f"{state.usage.cached_tokens} of {state.usage.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
