"""Few-shot multiple choice, as in MMLU: many questions share one prefix of examples, which is computed once.

`select` scores the options by their texts, not by the letters A to D, because a very small model cannot map letters
to options.
"""

from __future__ import annotations

import plait
from plait import select

SHOWN = [
    ("Which planet is known as the red planet?", "Mars"),
    ("What is 7 times 8?", "56"),
    ("Who wrote Hamlet?", "Shakespeare"),
]
ASKED = [
    ("What is the capital of France?", ["Rome", "Madrid", "Paris", "Berlin"], "Paris"),
    ("Which gas do plants take in?", ["Oxygen", "Carbon dioxide", "Helium", "Neon"], "Carbon dioxide"),
    ("How many legs has a spider?", ["Eight", "Six", "Four", "Ten"], "Eight"),
    ("Which animal barks?", ["Cat", "Cow", "Dog", "Bird"], "Dog"),
    ("Water freezes at how many degrees Celsius?", ["100", "50", "10", "0"], "0"),
]


@plait.function
def answer(s, question, options):
    s += "Questions, with their answers.\n\n"
    for shown, its_answer in SHOWN:
        s += f"Question: {shown}\nAnswer: {its_answer}\n\n"
    s += f"Question: {question}\nAnswer:" + select("answer", [f" {option}" for option in options])


def main() -> None:
    states = answer.run_batch([{"question": question, "options": options} for question, options, _ in ASKED])
    right = 0
    for state, (question, _, expected) in zip(states, ASKED, strict=True):
        choice = state["answer"].strip()
        right += choice == expected
        print(f"{question} {choice}" + ("" if choice == expected else f" (right: {expected})"))
    cached = sum(state.usage.cached_tokens for state in states)
    total = sum(state.usage.prompt_tokens for state in states)
    print(f"{right} of {len(ASKED)} right; {cached} of {total} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
