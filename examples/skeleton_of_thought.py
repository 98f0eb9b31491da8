"""Skeleton of thought: first the points of an answer, then the text of all points in parallel.

Ning et al. 2023, arXiv:2307.15337. The points are a typed list, so nothing has to be parsed. The text of a point is
generated in its own branch, and all branches are decoded in one batch.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

import plait
from plait import assistant, gen, system, user

Point = Annotated[str, msgspec.Meta(pattern="^[A-Z][a-z ]{7,39}$")]
SKELETON = "First only the skeleton: three points, a few words each, as a JSON list."
SHOWN = '["Keep fixed hours", "Make the room dark", "Drink no coffee"]'
Points = Annotated[list[Point], msgspec.Meta(min_length=3, max_length=3)]


@plait.function
def answer(s, question):
    s += system("You are helpful and brief.")
    s += user(f"How do I sleep well? {SKELETON}") + assistant(SHOWN)
    s += user(f"{question} {SKELETON}") + assistant(gen("points", type=Points, max_tokens=60))
    points = s["points"]

    def write_out(branch, point):
        branch += user(f"Say in one sentence how to do this: {point}.")
        branch += assistant(gen("text", max_tokens=40, stop="\n"))

    plait.map(s, points, write_out)
    return list(zip(points, s["text"], strict=True))


def main() -> None:
    question = "How do I stay healthy?"
    state = answer.run(question, temperature=0)
    print(question)
    for number, (point, text) in enumerate(state.ret_value, 1):
        print(f"{number}. {point}: {text.strip()}")
    points, texts = state.usage.by_variable["points"], state.usage.by_variable["text"]
    print(f"skeleton: {points.sampled_tokens} tokens sampled, {points.forced_tokens} forced; ", end="")
    print(f"points: {texts.sampled_tokens} tokens on {texts.calls} branches side by side")


if __name__ == "__main__":
    main()
