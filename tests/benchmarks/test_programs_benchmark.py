"""The benchmark of the paper's programs: its offline optimum, its table, and a run of it on the chain model."""

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
from plait.runtime.client.call import Call
from plait.runtime.errors import Aborted
from plait.runtime.messages import Append, Finished, Fork, Generate, Open, Usage
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.detokenizer import Detokenizer

TOKENS = st.lists(st.integers(65, 66), max_size=6)  # two letters, so that texts often begin alike
STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 4), TOKENS),
    st.tuples(st.just("answer"), st.integers(0, 4), TOKENS, st.booleans()),
    st.tuples(st.just("fail"), st.integers(0, 4)),
    st.tuples(st.just("fork"), st.integers(0, 4)),
)


class Wire:
    """What `IdealCacheMeter` watches: a client that answers with what it is told to."""

    def __init__(self) -> None:
        self.vocabulary = byte_tokenizer().vocabulary
        self.next = (list[int](), True)

    def send(self, request: object) -> None:
        pass

    def start_call(self, session: int, request: object, *rest: object) -> Call:
        tokens, has_end = self.next
        call = Call(0, Detokenizer(self.vocabulary), lambda: None)
        if tokens is None:
            call.on_failed(Aborted("it was not to be"))
        else:
            call.on_tokens(tokens, None)
            call.on_finished(Finished(0, "stop", Usage(completion_tokens=len(tokens) + has_end)))
        return call


def asked(call: int) -> Generate:
    return Generate(0, call, SamplingParams(), None)


def in_common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(STEPS, max_size=14))
def test_the_best_possible_is_that_of_comparing_every_call_with_all_before(steps) -> None:
    wire = Wire()
    sent = IdealCacheMeter(wire)
    wire.send(Open(0, "", 0))
    texts: list[list[int] | None] = [[]]  # of each session; None: a call before failed
    known: list[list[int]] = []  # what calls have computed
    expected = 0
    for kind, place, *rest in steps:
        session = place % len(texts)
        text = texts[session]
        if kind == "append":
            wire.send(Append(session, rest[0]))
            texts[session] = None if text is None else text + rest[0]
        elif kind == "fork":
            wire.send(Fork(session, [len(texts)]))
            texts.append(text)
        else:
            wire.next = (None, True) if kind == "fail" else tuple(rest)
            wire.start_call(session, asked)
            if text is not None:
                expected += max(0, min(max((in_common(text, each) for each in known), default=0), len(text) - 1))
                tokens, has_end = wire.next if kind == "answer" else ([], False)
                known.append(text + (tokens if has_end else tokens[:-1]))
                texts[session] = text + tokens if kind == "answer" else None
    sent.stop()
    assert sent.best_cached_tokens() == expected


@plait.function
def thinking(s, number):
    s += user(f"Say something about {number}.") + assistant(gen("thought", max_tokens=9, stop="C"))
    forks = s.fork(2)
    forks += lambda i: user(f"Is point {i} right?") + assistant(gen("why", max_tokens=5) + select("is", ["yes", "no"]))
    forks.join()
    s += user("So?") + assistant(gen("end", max_tokens=6))


def test_a_program_by_itself_reaches_exactly_the_best_possible() -> None:
    """The scheduler's own counts and the offline optimum agree to the token where nothing has to make room."""
    with chain_engine(byte_tokenizer()) as engine:

        def work(client):
            return [thinking.run(number, backend=client, temperature=0) for number in range(3)]

        took = measure_plait(work, engine.client, 1)
    assert took.best and took.of_best == 1.0
    assert took.prompt - took.computed == took.best > took.computed


def test_the_table_says_what_was_measured() -> None:
    found = {
        "plait": {"judge": Measurement(1.0, 1000, 250, 40, 780), "endings": Measurement(0.5, 100, 100, 0, 0)},
        "vLLM": {"judge": Measurement(4.0, 1000, 900, 44), "endings": Measurement(0.25, 100, 100, 8)},
    }
    rows = table(found, ["judge", "endings"]).splitlines()
    assert rows[0].startswith("| program | plait | vLLM | ratio |")
    assert rows[2] == "| judge | 1.00 s | 4.00 s | 0.25 | 40 / 44 | 250 / 900 | 75.0% / 10.0% | 96.2% |"
    assert rows[3] == "| endings | 0.50 s | 0.25 s | 2.00 | 0 / 8 | 100 / 100 | 0.0% / 0.0% | - |"
    assert "1.00 s | 4.00 s | 0.25 (goal 0.5)" in rows[4] and "at least 96.2%" in rows[4]  # without what shares nothing


def test_a_program_that_a_side_does_not_finish_says_so_and_the_rest_goes_on(capsys) -> None:
    """An answer that cannot be read as its gen's type is the peer's row, not the end of the run."""

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
    mine = {"judge": Measurement(2.0, 100, 50, 10, 60), "rag": Measurement(0.5, 100, 50, 10, 50)}
    said = table({"plait": mine, "vLLM": rows}, ["judge", "rag"]).splitlines()
    assert said[2] == "| judge | 2.00 s | failed | - | - | - | - | - |"
    assert said[4].startswith("| **those that share** | 0.50 s | 1.00 s | 0.50 "), "a broken row is in no sum"
    assert said[-1] == f"vLLM did not finish judge: {rows['judge'].why}"
    assert all(line.count("|") == said[0].count("|") for line in said[:5])
