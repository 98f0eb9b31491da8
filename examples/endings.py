"""The most likely ending of a text, as in HellaSwag: `select` scores several endings of one context.

The scores are mean logprobs per token."""

from __future__ import annotations

import plait
from plait import select

STORIES = [
    (
        "A man pours batter into a hot pan. He waits until it bubbles, and then",
        [" he flips the pancake.", " he paints the ceiling.", " the pan sings a song.", " he plants a tree in it."],
    ),
    (
        "The girl puts on her skates and steps onto the ice. She",
        [" opens a book about whales.", " glides across the rink.", " boils an egg.", " mows the lawn."],
    ),
]


@plait.function
def finish(s, context, endings):
    s += context + select("ending", endings)


def main() -> None:
    for context, endings in STORIES:
        state = finish.run(context, endings)
        print(context + state["ending"])
        scores = state.get_meta_info("ending")["choice_scores"]
        for score, ending in sorted(zip(scores, endings, strict=True), reverse=True):
            print(f"  {score:7.3f} {ending}")


if __name__ == "__main__":
    main()
