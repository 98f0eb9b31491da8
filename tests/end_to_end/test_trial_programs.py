"""Programs of new users: tree search with cancel, map-reduce that resumes, 1,000 selects, two client processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import plait
from plait import assistant, gen, select, user


@plait.function
def search(s, goal, width, depth):
    """Best-first search: a thought is scored by how likely the goal is after it. Other branches are cancelled."""
    s += "A story. Once"
    frontier, path, cancelled = s, [], []
    for level in range(depth):
        branches = frontier.fork(width)
        branches += gen("thought", max_tokens=4, temperature=1.0, ignore_eos=True)
        judges = [branch.fork(1)[0] for branch in branches]
        for branch, judge in zip(branches, judges, strict=True):
            judge += select("goal", [goal, " nothing."])
            branch += gen(f"long_{level}", max_tokens=2000, ignore_eos=True)  # started early, in case it is kept
        scores = [judge.get_meta_info("goal")["choice_scores"][0] for judge in judges]
        best = max(range(width), key=scores.__getitem__)
        path.append(branches[best]["thought"])
        for branch in branches:
            branch.cancel()
            cancelled.append(branch)
        frontier = s.fork(1)[0]
        frontier += "".join(path)
    s += "".join(path)
    return path, cancelled


def test_tree_search_cancels_what_it_does_not_need(runtime):
    sampled_before = runtime.client.status().sampled_tokens
    state = search.run(" home.", 3, 2, backend=runtime, seed=1)
    path, cancelled = state.ret_value
    assert len(path) == 2 and len(cancelled) == 6 and state.text() == "A story. Once" + "".join(path)
    assert state.error() is None, "a cancelled branch does not fail the program"
    assert runtime.client.status().sampled_tokens - sampled_before < 6 * 2000, "their calls ended early"


@plait.function
def summarize(s, chunk):
    s += f"Text: {chunk}\nOne word:" + gen("word", max_tokens=2)


def test_map_reduce_over_200_chunks_resumes(runtime, tmp_path):
    items = [{"chunk": f"{number} birds sit on a roof."} for number in range(200)]
    options = {"backend": runtime, "temperature": 0, "resume": tmp_path / "words"}
    first = summarize.run_batch(items[:120], **options)  # the program ended here
    prompts_before = runtime.client.status().prompt_tokens
    states = summarize.run_batch(items, **options)
    assert [state["word"] for state in states[:120]] == [state["word"] for state in first]
    new_prompts = sum(state.get_meta_info("word")["prompt_tokens"] for state in states[120:])
    assert runtime.client.status().prompt_tokens - prompts_before == new_prompts

    @plait.function
    def reduce(s, words):
        s += "Words: " + ", ".join(words) + ".\nMost are about" + select("topic", [" birds", " numbers"])

    words = [state["word"].strip() or "-" for state in states]
    assert reduce.run(words, backend=runtime)["topic"] in (" birds", " numbers")


def test_1000_selects_share_their_prefix(runtime):
    @plait.function
    def classify(s, number):
        s += f"Cats purr. Dogs bark. The number is {number}. It is " + select("kind", Literal["even", "odd"])

    states = classify.run_batch([{"number": number} for number in range(1000)], backend=runtime)
    assert {state["kind"] for state in states} <= {"even", "odd"} and not any(state.error() for state in states)
    usage = [state.usage for state in states]
    assert sum(item.cached_tokens for item in usage) > sum(item.computed_tokens for item in usage) / 2


OTHER_PROCESS = """
import sys, plait
runtime = plait.Runtime.connect(sys.argv[1])

@plait.function
def count(s):
    s += "One, two, three," + plait.gen("rest", max_tokens=6)

state = count.run(backend=runtime, temperature=0)
print(state["rest"], state.usage.cached_tokens, sep="|")
runtime.shutdown()
"""


def test_two_processes_share_a_runtime_and_its_cache(runtime, tmp_path):
    script = tmp_path / "other.py"
    script.write_text(OTHER_PROCESS)
    answers = []
    for _ in range(2):
        command = [sys.executable, "-P", script, str(runtime.address)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        answers.append(done.stdout.strip().split("|"))
    assert answers[0][0] == answers[1][0] and int(answers[1][1]) > 0

    @plait.function
    def talk(s):
        s += user("Hello.") + assistant(gen("answer", max_tokens=2))

    assert talk.run(backend=runtime)["answer"], "the end of another process does not end the runtime"
