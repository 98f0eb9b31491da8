"""`Recording`, `Replay` and `recorded`: a recording gives the same run without a runtime."""

from __future__ import annotations

import json

import msgspec
import pytest
from tool_examples import call_text
from trip_program import add, trip

import plait
from plait import assistant, gen, select, system, user
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Fork, Generate
from plait.testing import Recording, Replay, ReplayMismatch, ScriptError, recorded


def observable_results(state):
    names = ["capital", "kind", "tip"]
    metas = [state.get_meta_info(name) for name in names[:2]]
    usage = state.usage
    tokens = [usage.calls, usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.completion_tokens]
    return [state.text(), state.messages(), [state[name] for name in names], metas, tokens, usage.queue_s]


@pytest.fixture
def recording(backend, tmp_path):
    """(file with a recorded run of `trip`, observable results of that run)."""
    path = tmp_path / "trip.jsonl"
    backend.script(("assistant\n", "Paris"), default="fine")
    with Recording(path):
        state = trip.run("France", temperature=0, return_logprob=True, top_logprobs_num=2)
        recorded_results = observable_results(state)
    return path, recorded_results


def run_trip(country="France", **changed):
    return trip.run(country, **{"temperature": 0, "return_logprob": True, "top_logprobs_num": 2, **changed})


def test_replay_gives_the_same_results_without_a_runtime(recording, backend):
    path, recorded_results = recording
    sent_before = len(backend.scheduler.sent(Generate))
    with Replay(path):
        assert observable_results(run_trip()) == recorded_results
    assert len(backend.scheduler.sent(Generate)) == sent_before, "nothing reached the runtime"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["plait_recording"] == 1 and len(lines) == 5
    assert {line["name"] for line in lines[1:]} == {"capital", "kind", "tip"}
    assert isinstance(recorded_results[3][0]["output_token_logprobs"][0], tuple)


@pytest.mark.parametrize(
    ("country", "changed", "message"),
    [
        (
            "Spain",
            {},
            r"gen\('capital'\) was not recorded\. It differs from .*line 2\) in the prompt, "
            r"from character \d+ on, after '.*capital of ': recorded 'France\?.*now 'Spain\?",
        ),
        ("France", {"temperature": 0.5}, "in temperature: recorded 0.0, now 0.5 "),
        ("France", {"seed": 7, "top_p": 0.9}, "in seed: recorded None, now 7; top_p: recorded 1.0, now 0.9 "),
    ],
)
def test_replay_mismatch_names_the_difference(recording, country, changed, message):
    with pytest.raises(plait.ProgramError, match=message) as caught, Replay(recording[0]):
        run_trip(country, **changed)
    assert isinstance(caught.value.__cause__, ReplayMismatch)


def test_recorded_call_is_played_exactly_once(recording):
    with Replay(recording[0]) as replay:
        run_trip()
    with pytest.raises(plait.ProgramError, match="made more often than it was recorded"):
        run_trip(backend=replay)
    with (
        pytest.raises(ScriptError, match=r"4 recorded calls were not made: 'capital' \(line 2\)"),
        Replay(recording[0]),
    ):
        pass
    with Replay(recording[0], all_used=False):
        pass


def test_replay_ignores_timeouts_and_replays_failures(backend, tmp_path):
    backend.scheduler.answer = lambda prompt, request: CallFailed("broken")
    path = tmp_path / "failed.jsonl"
    with Recording(path), pytest.raises(plait.ProgramError, match="broken"):
        trip.run("France", timeout=5)
    assert len(path.read_text().splitlines()) == 2, "calls after a failed call are not recorded"
    with Replay(path), pytest.raises(plait.ProgramError, match="broken") as caught:
        trip.run("France", timeout=6)
    assert type(caught.value.__cause__) is CallFailed


def test_recorded_writes_the_file_once_and_replays_it(backend, tmp_path):
    path = tmp_path / "trip.jsonl"
    for _ in range(2):
        with recorded(path):
            states = trip.run_batch([{"country": letter} for letter in "abcdef"], num_threads=3)
            assert all(state["capital"] == " fine." for state in states)
    assert len(backend.scheduler.sent(Generate)) == 18
    with pytest.raises(KeyError), Recording(tmp_path / "broken.jsonl"):
        trip.run("France")["nothing"]
    assert [file.name for file in tmp_path.iterdir()] == ["trip.jsonl"], "a failed run leaves no recording"
    for text in ("", "{}\n", "nonsense\n", path.read_text() + '{"name": 1}\n'):
        path.write_text(text)
        with pytest.raises(plait.InputError, match=r"trip\.jsonl"):
            Replay(path)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.part"])
def test_only_a_recording_is_replaced(backend, tmp_path, name):
    path, other = tmp_path / "mine.jsonl", tmp_path / name
    for content in ("", '{"plait_recording": 0}\n'):
        other.write_text(content)
        with Recording(path):
            trip.run("France")
        assert Replay(path) and path.stat().st_size > 100
    other.write_text('{"mine": 1}\n')
    with pytest.raises(plait.InputError, match="is not a recording; remove it or name another file"):
        Recording(path)
    assert other.read_text() == '{"mine": 1}\n'


def test_a_file_that_is_written_meanwhile_is_not_replaced(backend, tmp_path):
    path = tmp_path / "mine.jsonl"
    recording = Recording(path)
    path.write_text("mine")
    with pytest.raises(plait.InputError, match="is not a recording"):
        recording.close()
    assert path.read_text() == "mine"


def test_tool_calls_replay(backend, tmp_path):
    @plait.function
    def agent(s):
        s += system("You add.", tools=[add]) + user("1 + 2?")
        s += assistant(gen("step", tools=[add]))
        s.call("step")
        s += assistant(gen("answer"))

    backend.script(("1 + 2?<<|im_end|>>\n<<|im_start|>>assistant\n", call_text("add", a=1, b=2)), default="3.")
    for _ in range(2):
        with recorded(tmp_path / "agent.jsonl"):
            state = agent.run()
        assert state["step"].arguments == {"a": 1, "b": 2} and state["answer"] == "3."


@plait.function
def two_adapters(s, second):
    s += "a" + gen("first", max_tokens=2, adapter="one")
    s += gen("second", max_tokens=2, adapter=second) + select("third", ["x", "y"])


def test_calls_are_told_apart_by_their_adapter(backend, tmp_path):
    backend.client.model = msgspec.structs.replace(backend.client.model, adapters={"one": "00", "two": "01"})
    path = tmp_path / "adapters.jsonl"
    with Recording(path):
        recorded_state = two_adapters.run("two")
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line.get("adapter") for line in lines] == ["one", "two", None]
    assert [request.adapter for request in backend.scheduler.sent(Fork)] == ["one", "two", ""]
    with Replay(path):
        assert two_adapters.run("two").text() == recorded_state.text()
    phrase = "adapter: recorded 'two', now None"
    with pytest.raises(ReplayMismatch, match=phrase), Replay(path), pytest.raises(plait.ProgramError, match=phrase):
        two_adapters.run("")
