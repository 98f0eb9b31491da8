"""One step of generative agents: the people of a village decide what to do next. Park et al. 2023, arXiv:2304.03442.

All people decide in one batch. The rules are a prefix of all prompts and computed once; the memories of a person are a
prefix of that person's calls. The number before each memory in the output is its weight: the probability that the
person still thinks of it.
"""

from __future__ import annotations

import math
from typing import Literal

import plait
from plait import assistant, gen, select, system, user

RULES = (
    "You play the people of a small village. The village has a bakery, a library, a park and a market. People go to "
    "work in the morning, meet at noon, and talk about what they have seen."
)
PLACES = ["bakery", "library", "park", "market"]
VILLAGE = {
    "Ada, the baker": ["sold all her bread today", "wants to learn about rye flour"],
    "Ben, the librarian": ["found an old cook book", "has not eaten since the morning"],
    "Cleo, the gardener": ["planted roses in the park", "heard that it will rain"],
}


@plait.function
def step(s, person, memories):
    s += system(RULES)
    s += user(f"You are {person}. What you remember:\n" + "\n".join(f"- {memory}" for memory in memories))

    def weigh(branch, memory):  # the weight of one memory, in its own branch
        branch += user(f"Do you still think of this: you {memory}?")
        branch += assistant(select("moves", ["No", "Yes"]))

    branches = plait.map(s, memories, weigh)
    weights = [round(yes(branch.get_meta_info("moves")["choice_scores"]), 2) for branch in branches]
    heaviest = memories[weights.index(max(weights))]
    s += user(f"What matters most now is that you {heaviest}. Where do you go?")
    s += assistant("I go to the " + select("place", PLACES) + ".")
    s += user("Are you there alone?")
    s += assistant("I am there " + gen("company", type=Literal["alone", "with a friend", "in a crowd"]) + ".")
    s += user("What do you do there? One short sentence.")
    s += assistant("I " + gen("plan", stop=[".", "\n"], max_tokens=20))
    return dict(zip(memories, weights, strict=True))


def yes(scores):
    """The probability of the second of two choices, by their log-likelihoods."""
    return 1 / (1 + math.exp(scores[0] - scores[1]))


def main() -> None:
    people = [{"person": person, "memories": memories} for person, memories in VILLAGE.items()]
    states = step.run_batch(people, temperature=0)
    for state, person in zip(states, VILLAGE, strict=True):
        print(f'{person}, goes to the {state["place"]} and is there {state["company"]}: "I {state["plan"].strip()}."')
        print("  " + ", ".join(f"{weight} {memory}" for memory, weight in state.ret_value.items()))
    cached = sum(state.usage.cached_tokens for state in states)
    print(f"{cached} of {sum(state.usage.prompt_tokens for state in states)} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
