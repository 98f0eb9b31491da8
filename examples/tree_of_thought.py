"""A tree of thoughts: several plans, each judged; the best ones are carried on. Yao et al. 2023, arXiv:2305.10601.

Branches are forks of forks: whatever two thoughts have in common is computed once. A fork that is not carried on is
simply left; its pages are given back.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

import plait
from plait import assistant, gen, system, user

QUESTION = "Anna has 3 boxes with 4 apples each. She gives 5 apples to Tom. How many apples are left?"
Score = Annotated[int, msgspec.Meta(ge=1, le=9)]


def judged(branch):
    """Asks for a score on a branch of the branch, so that the judgement is not part of the thought."""
    judge = branch.fork(1)
    judge += user("From 1 to 9, how good is this so far?") + assistant(gen("score", type=Score))
    return lambda: judge[0]["score"]


def best(branches, keep):
    """The branches with the highest scores. All judges are asked before any score is read."""
    asked = [(judged(branch), branch) for branch in branches]
    scored = [(score(), -place, branch) for place, (score, branch) in enumerate(asked)]
    return [(branch, score) for score, _, branch in sorted(scored, key=lambda each: each[:2], reverse=True)[:keep]]


@plait.function
def solve(s, question, width=3, keep=1):
    s += system("You solve problems in short steps.") + user(question)
    plans = s.fork(width)
    plans += lambda i: (
        user("Say in one sentence how you would solve it.")
        + assistant(gen("plan", max_tokens=24, stop="\n", temperature=0.9, seed=i))
    )
    answers = []
    for plan, plan_score in best(plans, keep):
        ways = plan.fork(2)
        ways += lambda i: (
            user("Now work it out in one sentence.")
            + assistant(gen("work", max_tokens=40, stop="\n", temperature=0.5, seed=i))
            + user("So how many are left? Only the number.")
            + assistant(gen("answer", regex="[0-9]{1,2}"))
        )
        answers += [(way, plan_score, score) for way, score in best(ways, 1)]
    return [
        {"plan": way["plan"].strip(), "work": way["work"].strip(), "answer": way["answer"], "scores": (first, second)}
        for way, first, second in answers
    ]


def main() -> None:
    print(QUESTION)
    state = solve.run(QUESTION, temperature=0)
    for found in state.ret_value:
        print(f"plan:   {found['plan']}\nwork:   {found['work']}\nanswer: {found['answer']}, scores {found['scores']}")
    usage = state.usage
    print(f"{usage.calls} calls; {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
