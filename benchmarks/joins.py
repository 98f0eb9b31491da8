"""What a join that does not wait gains: programs of the SGLang paper whose branches fork and join inside.

    python benchmarks/joins.py [--users 1 4] [--rounds 5] [--model MODEL]

Each program runs as written, and with a read of the joined variable behind every inner join, which waits as a join that
waits would. The two take turns, from an empty cache, greedy, with answers of fixed lengths. Printed are the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import plait
from plait import assistant, gen, select, user

TOPICS = ("a boy who finds an old boat", "a girl and a river", "a storm", "a lost letter")


def _join(forks: Any, state: plait.ProgramState, name: str, waits: bool) -> None:
    forks.join()
    if waits:
        state[name]


def _text(name: str, max_tokens: int) -> plait.lang.core.expressions.Expr:
    return assistant(gen(name, max_tokens=max_tokens, ignore_eos=True))


@plait.function
def tree_of_thought(s: plait.ProgramState, topic: str, waits: bool) -> None:
    """Three plans, each with two drafts of its end and a mark."""
    s += user(f"I want to write a story about {topic}. Suggest a plan.")
    plans = s.fork(3)
    for number, plan in enumerate(plans):
        plan += user(f"This is plan number {number + 1}.") + _text("plan", 24)
        drafts = plan.fork(2)
        drafts += lambda i: user(f"Write version {i + 1} of the end.") + _text("end", 24)
        _join(drafts, plan, "end", waits)
        plan += user("Is the plan good?") + assistant(select("good", ["yes", "no"]))
    plans.join()
    s += user("Which plan is the best?") + _text("choice", 8)


@plait.function
def skeleton_of_thought(s: plait.ProgramState, topic: str, waits: bool) -> None:
    """Four points of an answer, each with a fact and an example, then a sentence about the point."""
    s += user(f"How do I write about {topic}? Give four points.") + _text("points", 24)
    points = s.fork(4)
    for number, point in enumerate(points):
        point += user(f"Expand point {number + 1}.")
        parts = point.fork(2)
        parts += lambda i: user(("Give a fact.", "Give an example.")[i]) + _text("part", 20)
        _join(parts, point, "part", waits)
        point += user("Now in one sentence.") + _text("sentence", 20)
    points.join()


@plait.function
def judge(s: plait.ProgramState, topic: str, waits: bool) -> None:
    """Three criteria, each with an opinion for and against, then a grade (branch, solve, merge)."""
    s += user(f"Here is an essay: It is about {topic}, and it is short. Judge it.")
    criteria = s.fork(3)
    for criterion, name in zip(criteria, ("clarity", "style", "content"), strict=True):
        criterion += user(f"Think about its {name}.")
        sides = criterion.fork(2)
        sides += lambda i: user(("What is good?", "What is bad?")[i]) + _text("side", 24)
        _join(sides, criterion, "side", waits)
        criterion += user("The grade, from 1 to 5?") + assistant(select("grade", ["1", "2", "3", "4", "5"]))
    criteria.join()
    s += user("The grade of all?") + _text("grade_of_all", 8)


PROGRAMS = (tree_of_thought, skeleton_of_thought, judge)


def seconds(program: Any, runtime: plait.Runtime, users: int, waits: bool) -> float:
    """Runs the program for `users` users at a time, from an empty cache."""
    plait.flush_cache(runtime)
    items = [{"topic": topic, "waits": waits} for topic in TOPICS[:users]]
    began = time.perf_counter()
    states = program.run_batch(items, backend=runtime, temperature=0)
    took = time.perf_counter() - began
    for state in states:
        if state.error() is not None:
            raise SystemExit(f"{program.name}: {state.error()}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, nargs="*", default=[1, 4], help=f"users at a time, at most {len(TOPICS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model")
    options = parser.parse_args()
    print("| program | users | a join waits | it does not | ratio |\n|---|---|---|---|---|")
    with plait.Runtime(options.model, progress=False) as runtime:
        for program in PROGRAMS:
            for users in options.users:
                for waits in (True, False):
                    seconds(program, runtime, users, waits)
                rounds = [[seconds(program, runtime, users, waits) for waits in (True, False)]
                          for _ in range(options.rounds)]  # fmt: skip
                waiting, free = map(statistics.median, zip(*rounds, strict=True))
                row = f"{waiting:.2f} s | {free:.2f} s | {waiting / free:.2f}"
                print(f"| {program.name.replace('_', ' ')} | {users} | {row} |", flush=True)
    print(f"\nLoad when it ended: {os.getloadavg()[0]:.1f}; medians of {options.rounds} runs each.")


if __name__ == "__main__":
    main()
