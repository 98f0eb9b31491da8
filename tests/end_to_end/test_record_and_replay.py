"""A recorded run of the embedded model, replayed: the same text, values, usage, scores and tool calls."""

from __future__ import annotations

from typing import Literal

import plait
from plait import assistant, gen, select, system, user
from plait.testing import Recording, Replay


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@plait.function
def program(s, question):
    s += system("You are brief.", tools=[add]) + user(question + " <|im_end|>é")
    s += assistant(gen("step", tools=[add], max_tokens=48))
    s.call("step")
    s += user("So?") + assistant(gen("answer", max_tokens=8, n=2, return_logprob=True, top_logprobs_num=2, stop="\n"))
    s += user("Sure?") + assistant(select("sure", ["yes", "no"]))
    forks = s.fork(2)
    forks += lambda i: user(f"Grade {i}.") + assistant(gen("grade", type=Literal[1, 2, 3]))
    forks.join()


def observable_state(state):
    names = ["step", "answer", "sure", "grade"]
    metas = [state.get_meta_info(name) for name in names[:3]]
    return [state.text(), state.messages(), [state[name] for name in names], metas, state.usage.__dict__ | CLOCK_FIELDS]


CLOCK_FIELDS = {"wall_s": 0.0, "by_variable": None}  # measured in each run


def test_a_replay_equals_the_recorded_run(runtime, tmp_path):
    with Recording(tmp_path / "run.jsonl", runtime):
        recorded = observable_state(program.run("1 + 2?", temperature=0, seed=3))
    with Replay(tmp_path / "run.jsonl") as replay:
        replayed = observable_state(program.run("1 + 2?", temperature=0, seed=3))
    assert replayed == recorded
    assert replay.model.model_path.endswith(".gguf") and recorded[4]["forced_tokens"] > 0
