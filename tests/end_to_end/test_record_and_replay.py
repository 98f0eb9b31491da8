"""What a real model answered is recorded, and played again it is the same run: values, costs, scores, tools."""

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


def everything(state):
    names = ["step", "answer", "sure", "grade"]
    metas = [state.get_meta_info(name) for name in names[:3]]
    return [state.text(), state.messages(), [state[name] for name in names], metas, state.usage.__dict__ | WALL]


WALL = {"wall_s": 0.0, "by_variable": None}  # by this process's own clock


def test_a_replay_is_the_run_it_was(runtime, tmp_path):
    with Recording(tmp_path / "run.jsonl", runtime):
        given = everything(program.run("1 + 2?", temperature=0, seed=3))
    with Replay(tmp_path / "run.jsonl") as replay:
        played = everything(program.run("1 + 2?", temperature=0, seed=3))
    assert played == given
    assert replay.model.model_path.endswith(".gguf") and given[4]["forced_tokens"] > 0
