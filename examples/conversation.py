"""A chat of several turns, streamed. The conversation so far is never sent, tokenized or computed again."""

from __future__ import annotations

import plait
from plait import assistant, gen, system, user

QUESTIONS = ["What is a volcano?", "Name a famous one.", "Is it dangerous to live near it?"]


@plait.function
def talk(s, questions):
    s += system("You answer children's questions in one short sentence.")
    for number, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer_{number}", max_tokens=32))


def main() -> None:
    state = talk.run(QUESTIONS, temperature=0, stream=True)
    for number, question in enumerate(QUESTIONS):
        print(f"> {question}\n  ", end="")
        for piece in state.text_iter(f"answer_{number}"):
            print(piece, end="", flush=True)
        usage = state.usage.by_variable[f"answer_{number}"]
        print(f"\n  ({usage.computed_tokens} prompt tokens computed, {usage.cached_tokens} from the cache)")
    print(f"{len(state.messages())} messages")


if __name__ == "__main__":
    main()
