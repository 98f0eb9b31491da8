"""`run_batch(resume=)` on the embedded model: values, scores, logprobs and usage come back as they were."""

from __future__ import annotations

import dataclasses

import pydantic

import plait
from plait import gen, select


class Person(pydantic.BaseModel):
    name: str
    age: int


@plait.function
def describe(s, topic):
    s += f"{topic}: " + gen("person", type=Person, max_tokens=40, return_logprob=True, top_logprobs_num=2)
    forks = s.fork(2)
    forks += " is " + select("mood", ["calm", "lively"]) + gen("why", max_tokens=4, n=2)
    forks.join()
    return s["person"]


def observed(state):
    names = ("person", "mood", "why")
    metas = [state.get_meta_info(name) for name in names]
    usage = dataclasses.asdict(dataclasses.replace(state.usage, wall_s=0.0, by_variable={}))
    return [state[name] for name in names], metas, usage, state.text(), state.ret_value


def test_resumed_states_equal_the_fresh_ones(exact, tmp_path):
    items, how = [{"topic": "A baker"}, {"topic": "A pilot"}], {"temperature": 1.0, "seed": 7, "backend": exact}
    fresh = [observed(state) for state in describe.run_batch(items, resume=tmp_path / "batch.jsonl", **how)]
    before = exact.client.status().sessions
    resumed = [observed(state) for state in describe.run_batch(items, resume=tmp_path / "batch.jsonl", **how)]
    assert resumed == fresh and fresh[0][0] != fresh[1][0] and isinstance(resumed[0][4], Person)
    assert resumed[0][2]["calls"] == 7 and exact.client.status().sessions == before
