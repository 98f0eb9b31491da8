"""The job that spreads items over actors: every item ends once, whatever actors do. The actors here are simulated."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.lang.cluster.job import Done, Job, Lost, Ready
from plait.runtime.errors import ModelNotFound, RuntimeGone
from plait.runtime.messages import PROTOCOL, Welcome

KILLED = "killed while it starts"


class SimulatedActors:
    """Actors that run one step at each `next_events`. Items in `deadly` end the actor that runs them."""

    def __init__(self, seed=0, deadly=(), loss_rate=0.0, starts=lambda number: True, fingerprint=lambda number: "a"):
        self.fingerprint = fingerprint
        self.random, self.deadly, self.loss_rate, self.starts = random.Random(seed), set(deadly), loss_rate, starts
        self.starting, self.running, self.stopped = [], {}, []
        self.history = []  # (actor, item, what else ran there) of each submit
        self.most = 0
        self.now = 0.0

    def start(self):
        number = len(self.running) + 1
        self.running[number] = []
        self.starting.append(number)
        return number

    def submit(self, actor, item):
        assert actor not in self.starting and actor not in self.stopped
        self.history.append((actor, item, set(self.running[actor])))
        self.running[actor].append(item)
        self.most = max(self.most, len(self.running[actor]))

    def stop(self, actor):
        self.running[actor] = []
        self.stopped.append(actor)

    def lose(self, actor, cannot_start=None):
        self.stop(actor)
        return Lost(actor, f"actor {actor} was killed", cannot_start)

    def next_events(self, timeout_s):
        self.now += timeout_s
        events, starting, self.starting = [], self.starting, []
        for number in starting:
            started = self.starts(number)
            if started is True:
                model = Welcome(PROTOCOL, "model", 100, 1000, 1, model_fingerprint=self.fingerprint(number))
                events.append(Ready(number, model))
            elif started is KILLED:
                events.append(self.lose(number))
            elif started is None:
                self.starting.append(number)
            else:
                events.append(self.lose(number, started))
        for actor, items in list(self.running.items()):
            if not items:
                continue
            if self.deadly.intersection(items) or self.random.random() < self.loss_rate:
                events.append(self.lose(actor))
            else:
                item = items.pop(self.random.randrange(len(items)))
                events.append(Done(actor, item, f"result {item}"))
        return events


def make_job(actors, **settings):
    defaults = {"num_actors": 3, "capacity": 4, "max_attempts": 3, "start_timeout_s": 60, "clock": lambda: actors.now}
    return Job(actors, **{"on_lost": lambda reason: None} | defaults | settings)


def run(actors, groups, **settings):
    job = make_job(actors, **settings)
    job.wait_until_ready()
    finished = list(job.run(groups))
    assert len({each.item for each in finished}) == len(finished), "an item ended twice"
    assert {each.item for each in finished} == {item for group in groups for item in group}
    assert all(each.failure or each.result == f"result {each.item}" for each in finished)
    return {each.item: each.failure for each in finished if each.failure}


def grouped(count, size):
    return [list(range(at, min(at + size, count))) for at in range(0, count, size)]


@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 60),
    size=st.integers(1, 20),
    num_actors=st.integers(1, 5),
    capacity=st.integers(1, 9),
    max_attempts=st.integers(2, 4),
    deadly=st.sets(st.integers(0, 59), max_size=5),
)
@example(seed=757320, count=12, size=20, num_actors=3, capacity=3, max_attempts=2, deadly={0})  # joins a lone item
def test_only_deadly_items_fail_and_every_item_ends_once(seed, count, size, num_actors, capacity, max_attempts, deadly):
    deadly = {item for item in deadly if item < count}
    actors = SimulatedActors(seed, deadly)
    failures = run(actors, grouped(count, size), num_actors=num_actors, capacity=capacity, max_attempts=max_attempts)
    assert set(failures) == deadly
    assert actors.most <= capacity
    attempts = [item for _, item, _ in actors.history]
    assert all(attempts.count(item) == max_attempts for item in deadly)
    for item in deadly:  # the last attempt runs with nothing else, before it and beside it
        at = max(at for at, (_, other, _) in enumerate(actors.history) if other == item)
        actor, _, beside = actors.history[at]
        assert beside == set() and not [
            1 for other, _, with_ in actors.history[at:] if other == actor and item in with_
        ]


@given(seed=st.integers(0, 1 << 30), loss_rate=st.floats(0, 0.4))
def test_items_run_a_bounded_number_of_times_when_actors_are_lost_at_random(seed, loss_rate):
    actors = SimulatedActors(seed, loss_rate=loss_rate)
    run(actors, grouped(40, 7))
    attempts = [item for _, item, _ in actors.history]
    assert max(attempts.count(item) for item in range(40)) <= 3


def test_a_failure_says_how_each_actor_ended():
    failures = run(SimulatedActors(deadly={5}), grouped(8, 8), num_actors=1, max_attempts=2)
    assert failures[5].startswith("its actor ended 2 times while it ran: actor 1 was killed; actor ")


def test_a_group_runs_on_one_actor_and_none_idles():
    actors = SimulatedActors()
    run(actors, grouped(60, 20), capacity=2)
    actors_of = [{actor for actor, item, _ in actors.history if item in group} for group in grouped(60, 20)]
    assert sorted(len(each) for each in actors_of) == [1, 1, 1]
    one_group = SimulatedActors()
    run(one_group, grouped(60, 60), capacity=2)
    counts = [sum(actor == number for actor, _, _ in one_group.history) for number in (1, 2, 3)]
    assert max(counts) - min(counts) <= 2, "the group was not divided evenly"


def test_actors_that_cannot_start():
    missing = ModelNotFound("there is no model at 'x'")
    with pytest.raises(ModelNotFound, match="no model at 'x'"):
        run(SimulatedActors(starts=lambda number: missing), [[1]])
    assert run(SimulatedActors(starts=lambda number: number == 2 or missing), grouped(9, 2)) == {}
    with pytest.raises(RuntimeGone, match=r"no actor could start: actor \d+ was killed"):
        run(SimulatedActors(starts=lambda number: KILLED), [[1]])


def test_actors_that_never_start_are_given_up():
    actors = SimulatedActors(starts=lambda number: None)
    with pytest.raises(RuntimeGone, match="did not start within 60 s"):
        run(actors, [[1]])
    assert sorted(actors.stopped) == [1, 2, 3] and actors.now < 70
    assert run(SimulatedActors(starts=lambda number: True if number == 1 else None), grouped(200, 2)) == {}


def test_an_actor_with_another_model_is_not_used():
    actors, lost = SimulatedActors(fingerprint=lambda number: "b" if number == 2 else "a"), []
    assert run(actors, grouped(30, 3), on_lost=lost.append) == {}
    assert {actor for actor, _, _ in actors.history} == {1, 3}
    assert lost == ["an actor has another model than the first one: model, model"]


def test_items_fail_when_no_actor_is_left():
    dead = Lost(1, "the machine was switched off", RuntimeGone("gone"))

    class EndAfterTwo(SimulatedActors):
        def next_events(self, timeout_s):
            if len(self.history) >= 2:
                self.stop(1)
                return [dead]
            return super().next_events(timeout_s)

    failures = run(EndAfterTwo(), grouped(5, 5), num_actors=1, capacity=1, max_attempts=3)
    assert len(failures) == 4
    assert set(failures.values()) == {"no actor is left to run it; the last one: the machine was switched off"}
