"""Tree of thoughts: several beginnings of a story are scored, and the best continue. Yao et al. 2023, arXiv:2305.10601.

A small version of the paper's creative writing task: the last sentence is given, and a beginning is good if that
sentence is likely after it. `select` scores the sentence in a fork of the branch, so no judgement has to be generated.
The output shows the mean logprob of the sentence after one sentence of the story and after two. The text that branches
share is computed once.
"""

from __future__ import annotations

import plait
from plait import assistant_begin, assistant_end, gen, select, user

TOPIC, END = "a boy who finds an old boat", " And so the old boat sailed again."


def judged(branch, end):
    """Starts scoring `end` after the text of the branch. Returns a function that reads the mean logprob."""
    judge = branch.fork(1)
    judge += select("end", [end])
    return lambda: judge[0].get_meta_info("end")["choice_scores"][0]


def best(branches, end, keep):
    """The branches with the highest scores. All scoring calls are sent before a score is read."""
    judges = [(judged(branch, end), branch) for branch in branches]
    scored = [(round(read_score(), 2), -place, branch) for place, (read_score, branch) in enumerate(judges)]
    return [(score, branch) for score, _, branch in sorted(scored, key=lambda row: row[:2], reverse=True)[:keep]]


def thought(name):
    return gen(name, max_tokens=40, stop=[".", "\n"], temperature=0.6) + "."


@plait.function
def write(s, topic, end, width=4, keep=2):
    s += user(f"Write a story of three sentences about {topic}.") + assistant_begin()
    beginnings = s.fork(width)
    beginnings += thought("first")
    stories = []
    for first_score, beginning in best(beginnings, end, keep):
        middles = beginning.fork(width)
        middles += thought("then")
        stories += [(score, first_score, middle) for score, middle in best(middles, end, 1)]
    score, first_score, story = max(stories, key=lambda row: row[0])
    story += end + assistant_end()
    return [story["first"].strip(), story["then"].strip()], (first_score, score)


def main() -> None:
    state = write.run(TOPIC, END, seed=3)
    (first, then), scores = state.ret_value
    print(f"{first}.\n{then}.\n{END.strip()}\nmean logprob of the end: {scores}")
    usage = state.usage
    print(f"{usage.calls} calls; {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
