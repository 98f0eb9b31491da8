"""Few-shot multiple choice, the shape of MMLU: many questions over one prefix of examples, which is computed once."""

from __future__ import annotations

import plait
from plait import select

SHOWN = [
    ("Which planet is known as the red planet?", ["Venus", "Mars", "Jupiter", "Mercury"], "B"),
    ("What is 7 times 8?", ["54", "63", "56", "49"], "C"),
    ("Who wrote Hamlet?", ["Shakespeare", "Goethe", "Dante", "Homer"], "A"),
]
ASKED = [
    ("What is the capital of France?", ["Rome", "Madrid", "Paris", "Berlin"], "C"),
    ("Which gas do plants take in?", ["Oxygen", "Carbon dioxide", "Helium", "Neon"], "B"),
    ("How many legs has a spider?", ["Eight", "Six", "Four", "Ten"], "A"),
    ("Water freezes at how many degrees Celsius?", ["100", "50", "10", "0"], "D"),
]


def written(question: str, options: list[str]) -> str:
    lines = [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)]
    return "\n".join([f"Question: {question}", *lines, "Answer:"])


@plait.function
def answer(s, question, options):
    s += "These are multiple choice questions, with their answers.\n\n"
    for shown, its_options, letter in SHOWN:
        s += f"{written(shown, its_options)} {letter}\n\n"
    s += written(question, options) + select("letter", [" A", " B", " C", " D"])


def main() -> None:
    states = answer.run_batch([{"question": question, "options": options} for question, options, _ in ASKED])
    right = 0
    for state, (question, _, letter) in zip(states, ASKED, strict=True):
        right += state["letter"].strip() == letter
        print(f"{question} {state['letter'].strip()} (right: {letter})")
    cached = sum(state.usage.cached_tokens for state in states)
    total = sum(state.usage.prompt_tokens for state in states)
    print(f"{right} of {len(ASKED)} right; {cached} of {total} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
