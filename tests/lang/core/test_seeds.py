"""Seeds: a program repeats to the letter, and its branches, samples, gens and batch items differ, in every run mode."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_scheduler import Gate, ScriptedBackend
from seeded_programs import PROGRAMS, forwards, write

import plait
from plait import gen, select
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Generate, Select
from plait.runtime.seed_path import SeedPath, mixed_seed

pytestmark = pytest.mark.timeout(120)
SEED = 7


def backwards(work):
    for item in reversed(work):
        item()


def in_threads(work):
    threads = [threading.Thread(target=item) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


class SeedRecorder:
    """A scripted backend whose answers are the seeds; `seeds`: label of the gen -> the seeds of its samples."""

    def __init__(self):
        self.backend = ScriptedBackend()
        self.backend.scheduler.answer = self._answer
        self.seeds: dict[str, list[int]] = {}

    def _answer(self, prompt, request):
        self.seeds.setdefault(prompt[prompt.rindex("(") :], []).append(request.sampling.seed)
        return f"<{request.sampling.seed}>"

    def run(self, steps, order=forwards, **sampling):
        """Returns the seeds of one run; those of a gen in a branch that lost its race are among them."""
        self.seeds = {}

        @plait.function
        def program(s):
            s += "Q"
            write(s, steps, "", order)

        program.run(backend=self.backend, **{"seed": SEED, "temperature": 1} | sampling)
        return self.seeds


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=PROGRAMS)
def test_seeds_come_from_the_place_of_a_gen_alone(steps):
    recorder = SeedRecorder()
    seeds = recorder.run(steps)
    drawn = [seed for samples in seeds.values() for seed in samples]
    assert len(set(drawn)) == len(drawn), "no two calls have one seed"
    assert all(0 <= seed < 2**53 + 2 for seed in drawn)
    for order in (forwards, backwards, in_threads):
        assert recorder.run(steps, order) == seeds
    assert {seed for samples in recorder.run(steps, seed=SEED + 1).values() for seed in samples}.isdisjoint(
        set(drawn) - {SEED + 1}  # the first gen has the seed as it is, its second sample that seed + 1
    )
    for samples in recorder.run(steps, same_seed=True).values():
        assert samples == [SEED, SEED + 1][: len(samples)]


def test_first_gen_keeps_the_seed_and_the_others_do_not():
    seeds = SeedRecorder().run(["gen", "gen", ("fork", [["gen"], ["gen"]]), "gen"])
    assert seeds["(.0)"] == [SEED] and len({seed for (seed,) in seeds.values()}) == 5
    assert seeds["(.2/1.0)"] == [mixed_seed(SEED, (0, 1), 0)] and seeds["(.3)"] == [mixed_seed(SEED, (), 2)]


def test_winner_of_a_race_does_not_change_later_seeds():
    seen = []
    for winner in "012":
        recorder, gates = SeedRecorder(), {i: Gate("late") for i in "012"}
        answer = recorder.backend.scheduler.answer

        def answer_in_turn(prompt, request, answer=answer, gates=gates, winner=winner):
            text = answer(prompt, request)
            return gates[prompt[-4]] if prompt.endswith(".0)") and "/" in prompt[-6:] and prompt[-4] != winner else text

        recorder.backend.scheduler.answer = answer_in_turn
        seen.append(recorder.run([("race", [["gen"], ["gen"], ["gen"]]), "gen"]))
    assert len(seen[0]) == 4 and seen[0] == seen[1] == seen[2]


@plait.function
def item(s, tries=2):
    s += "(q)" + gen("first")
    forks = s.fork(tries)
    forks += "(b)" + gen("tip")
    forks.join()


@plait.function
async def async_item(s, tries=2):
    s += "(q)" + gen("first")
    forks = s.fork(tries)
    forks += "(b)" + gen("tip")
    await forks.join()


def test_batches_differ_by_item_and_repeat_in_every_mode(tmp_path):
    backend, how = SeedRecorder().backend, {"seed": SEED, "temperature": 1}
    how["backend"] = backend

    def texts(states):
        return [(state["first"], *state["tip"]) for state in states]

    expected = texts(item.run_batch([{}] * 4, **how))
    assert len({text for texts_of_item in expected for text in texts_of_item}) == 12
    assert texts([item.run(**how)]) == expected[:1], "item 0 is a single run"
    assert texts(item.run_batch([{}] * 4, num_threads=1, **how)) == expected
    assert texts(item.run_batch([{}] * 4, generator_style=True, **how)) == expected
    assert texts(async_item.run_batch([{}] * 4, **how)) == expected
    assert texts(asyncio.run(item.arun_batch([{}] * 4, **how))) == expected
    assert texts([item.compile(seed=SEED, temperature=1, tries=2).run(backend=backend)]) == expected[:1]
    alike = texts(item.run_batch([{}] * 4, same_seed=True, **how))
    assert set(alike) == {(f"<{SEED}>",) * 3}


@settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(failing=st.sets(st.integers(0, 5)))
def test_resumed_batch_equals_an_uninterrupted_one(failing, tmp_path_factory):
    file, recorder = tmp_path_factory.mktemp("resume") / "batch.jsonl", SeedRecorder()
    backend, answer = recorder.backend, recorder.backend.scheduler.answer
    how = {"backend": backend, "seed": SEED, "temperature": 1}
    items = [{"tries": 1 + number % 3} for number in range(6)]
    expected = [state.text() for state in item.run_batch(items, **how)]
    doomed = {text for number, text in enumerate(expected) if number in failing}
    backend.scheduler.answer = lambda prompt, request: (
        CallFailed("no") if f"{prompt}<{request.sampling.seed}>" in doomed else answer(prompt, request)
    )
    states = item.run_batch(items, resume=file, **how)
    assert {number for number, state in enumerate(states) if state.error()} == failing
    backend.scheduler.answer = answer
    assert [state.text() for state in item.run_batch(items, resume=file, **how)] == expected


def test_patterns_over_forks_draw_different_texts():
    recorder = SeedRecorder()

    @plait.function
    def program(s):
        s += "(q)"
        plait.best_of(s, 8, gen("x"), by=lambda branch: len(branch["x"]))
        plait.vote(s, 8, gen("y"), "y")
        plait.map(s, range(8), lambda branch, number: branch._append(gen("z")))
        with s.copy() as aside:
            aside += gen("w")

    first = program.run(backend=recorder.backend, seed=SEED, temperature=1)
    seeds = [seed for drawn in recorder.seeds.values() for seed in drawn]
    assert len(seeds) == len(set(seeds)) == 25
    assert program.run(backend=recorder.backend, seed=SEED, temperature=1).text() == first.text()


def test_same_seed_needs_a_seed_and_a_truth_value(backend):
    with pytest.raises(plait.InputError, match=r"gen\('x'\): same_seed must be True or False"):
        gen("x", same_seed=1)

    @plait.function
    def program(s):
        s += "Q" + gen("x", same_seed=True)

    with pytest.raises(plait.ProgramError, match="same_seed needs a seed"):
        program.run()
    assert program.run(seed=3)["x"] == " fine."
    with pytest.raises(plait.CompileError, match="same_seed needs a seed"):
        program.compile()
    graph = program.compile(seed=3)
    assert graph.json()["program"][1] == {"gen": {"name": "x", "same_seed": True}}
    assert "same_seed=true" in str(graph)


def test_path_counts_gens_and_forks_apart():
    path = SeedPath()
    first, second = path.fork(2), path.fork(2)
    assert [branch.path for branch in (*first, *second)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert SeedPath.of_item(0).path == () and SeedPath.of_item(3).fork(1)[0].path == (3, 0, 0)


def test_a_drawn_choice_mixes_its_seed_with_its_place_unless_it_is_the_same(backend):
    """As a gen does; and it counts as one for the gens behind it."""

    @plait.function
    def program(s):
        s += "Q" + select("first", ["a", "b"], exact=True) + select("second", ["a", "b"], exact=True)
        s += select("scored", ["a", "b"]) + gen("last", max_tokens=1)

    def seeds(**options):
        backend.scheduler.requests.clear()
        program.run(backend=backend, seed=SEED, **options)
        asked = [request for request in backend.scheduler.requests if isinstance(request, Generate | Select)]
        return [request.sampling.seed if isinstance(request, Generate) else request.seed for request in asked]

    assert seeds() == [SEED, mixed_seed(SEED, (), 1), None, mixed_seed(SEED, (), 2)]
    assert seeds(same_seed=True) == [SEED, SEED, None, SEED]
