"""The benchmark of the paper's programs: the optimum of cached tokens, the table, and failed programs."""

from __future__ import annotations

from chain_engine import chain_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from paper.ideal_cache import IdealCacheMeter
from paper.timing import FailedRun, Measurement, measure_plait
from paper_programs import _side, table
from scripted_scheduler import ScriptedBackend, byte_tokenizer

import plait
from plait import assistant, gen, select, user
from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call
from plait.runtime.errors import Aborted
from plait.runtime.messages import Append, Finished, Fork, Generate, Open
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.detokenizer import Detokenizer

TOKENS = st.lists(st.integers(65, 66), max_size=6)  # two letters, so that texts often share prefixes
STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 4), TOKENS),
    st.tuples(st.just("answer"), st.integers(0, 4), TOKENS, st.booleans()),
    st.tuples(st.just("fail"), st.integers(0, 4)),
    st.tuples(st.just("fork"), st.integers(0, 4)),
)


class FakeClient:
    """The client that `IdealCacheMeter` observes. Every call ends with `next`: (tokens, whether EOS was sampled)."""

    def __init__(self) -> None:
        self.vocabulary = byte_tokenizer().vocabulary
        self.next = (list[int](), True)

    def send(self, request: object) -> None:
        pass

    def start_call(self, session: int, request: object, *rest: object) -> Call:
        tokens, has_end = self.next
        call = Call(0, Detokenizer(self.vocabulary), lambda: None)
        if tokens is None:
            call.on_failed(Aborted("aborted"))
        else:
            call.on_tokens(tokens, None)
            call.on_finished(Finished(0, "stop", Usage(completion_tokens=len(tokens) + has_end)))
        return call


def generate_message(call: int) -> Generate:
    return Generate(0, call, SamplingParams(), None)


def common_length(first: list[int], other: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other))
    )


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(STEPS, max_size=14))
def test_best_cached_tokens_equals_a_comparison_with_all_previous_calls(steps) -> None:
    client = FakeClient()
    meter = IdealCacheMeter(client)
    client.send(Open(0, "", 0))
    texts: list[list[int] | None] = [[]]  # the texts of the sessions; None after a failed call
    known: list[list[int]] = []  # the texts that calls have computed
    expected = 0
    for kind, index, *rest in steps:
        session = index % len(texts)
        text = texts[session]
        if kind == "append":
            client.send(Append(session, rest[0]))
            texts[session] = None if text is None else text + rest[0]
        elif kind == "fork":
            client.send(Fork(session, [len(texts)]))
            texts.append(text)
        else:
            client.next = (None, True) if kind == "fail" else tuple(rest)
            client.start_call(session, generate_message)
            if text is not None:
                expected += max(
                    0, min(max((common_length(text, computed) for computed in known), default=0), len(text) - 1)
                )
                tokens, has_end = client.next if kind == "answer" else ([], False)
                known.append(text + (tokens if has_end else tokens[:-1]))
                texts[session] = text + tokens if kind == "answer" else None
    meter.stop()
    assert meter.best_cached_tokens() == expected


@plait.function
def two_points(s, number):
    s += user(f"Say something about {number}.") + assistant(gen("thought", max_tokens=9, stop="C"))
    forks = s.fork(2)
    forks += lambda i: user(f"Is point {i} right?") + assistant(gen("why", max_tokens=5) + select("is", ["yes", "no"]))
    forks.join()
    s += user("So?") + assistant(gen("end", max_tokens=6))


def test_a_single_program_reaches_the_optimum() -> None:
    """The scheduler's counts equal the optimum if nothing is evicted."""
    with chain_engine(byte_tokenizer()) as engine:

        def work(client):
            return [two_points.run(number, backend=client, temperature=0) for number in range(3)]

        measured = measure_plait(work, engine.client, 1)
    assert measured.best and measured.of_best == 1.0
    assert measured.prompt - measured.computed == measured.best > measured.computed


def test_the_table_shows_all_measurements() -> None:
    measurements = {
        "plait": {"judge": Measurement(1.0, 1000, 250, 40, 780), "endings": Measurement(0.5, 100, 100, 0, 0)},
        "vLLM": {"judge": Measurement(4.0, 1000, 900, 44), "endings": Measurement(0.25, 100, 100, 8)},
    }
    rows = table(measurements, ["judge", "endings"]).splitlines()
    assert rows[0].startswith("| program | plait | vLLM | ratio |")
    assert rows[2] == "| judge | 1.00 s | 4.00 s | 0.25 | 40 / 44 | 250 / 900 | 75.0% / 10.0% | 96.2% |"
    assert rows[3] == "| endings | 0.50 s | 0.25 s | 2.00 | 0 / 8 | 100 / 100 | 0.0% / 0.0% | - |"
    assert (
        "1.00 s | 4.00 s | 0.25 (goal 0.5)" in rows[4] and "at least 96.2%" in rows[4]
    )  # without the programs that share no prefix


def test_a_program_that_fails_on_one_side_has_its_own_row(capsys) -> None:
    """A value that cannot be converted to its type fails one program; the other programs are measured."""

    @plait.function
    def number(s, text):
        s += user("A number?") + assistant(gen("number", dtype=int, max_tokens=4))
        s["number"] / 1

    def unreadable(backend):
        scripted = ScriptedBackend()
        scripted.script(default="none")
        return [number.run("x", backend=scripted)]

    def measure(work, backend, rounds):
        work(backend)
        return Measurement(1.0, 100, 50, 10)

    rows = _side("vLLM", {"judge": unreadable, "rag": lambda backend: None}, measure, None, 1)
    assert isinstance(rows["judge"], FailedRun) and "number" in rows["judge"].why
    assert rows["rag"] == Measurement(1.0, 100, 50, 10)
    assert "UnreadableValue" in capsys.readouterr().err
    ours = {"judge": Measurement(2.0, 100, 50, 10, 60), "rag": Measurement(0.5, 100, 50, 10, 50)}
    lines = table({"plait": ours, "vLLM": rows}, ["judge", "rag"]).splitlines()
    assert lines[2] == "| judge | 2.00 s | failed | - | - | - | - | - |"
    assert lines[4].startswith("| **those that share** | 0.50 s | 1.00 s | 0.50 "), (
        "a failed program must not count in the sums"
    )
    assert lines[-1] == f"vLLM did not finish judge: {rows['judge'].why}"
    assert all(line.count("|") == lines[0].count("|") for line in lines[:5])
