"""A first plait program: chat turns, a value that matches a pattern, a choice, and three parallel branches.

Run it with `plait run examples/quickstart.py`, or as a plain Python file.
"""

from __future__ import annotations

import plait
from plait import assistant, gen, select, system, user


@plait.function
def trip(s, country):
    s += system("You are a helpful travel guide. You answer in one short sentence.")

    # Two questions. Nothing here waits: the second is sent while the first is being answered.
    s += user(f"What is the capital of {country}?")
    s += assistant(gen("capital", max_tokens=24))
    s += user("What is it famous for?")
    s += assistant(gen("fame", max_tokens=32))

    # A value that always matches its pattern, and one of three words.
    s += user("In which year was its best known sight built? Only the year.")
    s += assistant("It was built in " + gen("year", regex=r"1[0-9]{3}|20[01][0-9]") + ".")
    s += user("How should I get around there?")
    s += assistant("In the city, take the " + select("transport", ["metro", "bicycle", "car"]) + ".")

    # Three branches share all of the text above, and are computed in parallel.
    branches = s.fork(3)
    for branch, topic in zip(branches, ["food", "museums", "parks"], strict=True):
        branch += user(f"Give me one tip about {topic}.")
        branch += assistant(gen("tip", max_tokens=32))
    branches.join()  # s["tip"] is now the list of the three


def main() -> None:
    state = trip.run("France", temperature=0, stream=True)
    for name in ("capital", "fame", "year", "transport"):
        print(f"{name:>9}: ", end="", flush=True)
        for piece in state.text_iter(name):
            print(piece, end="", flush=True)
        print()
    for tip in state["tip"]:
        print(f"      tip: {tip}")

    usage = state.usage
    print(f"\n{usage.calls} calls with {usage.prompt_tokens} prompt tokens in all:")
    print(f"{usage.computed_tokens} were computed, {usage.cached_tokens} came from the prefix cache.")


if __name__ == "__main__":
    main()
