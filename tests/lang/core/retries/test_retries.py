"""`gen(type=..., retries=...)`: asking again after a validator refused the value."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import pydantic
import pytest
from scripted_scheduler import Gate

import plait
from plait import assistant, gen, user
from plait.runtime.errors import RuntimeGone
from plait.runtime.messages import Append, Generate
from plait.testing import Scripted

pytestmark = pytest.mark.timeout(120)


class Person(pydantic.BaseModel):
    name: str
    age: int

    @pydantic.field_validator("age")
    @classmethod
    def check_age(cls, age: int) -> int:
        if age > 150:
            raise ValueError("nobody is that old")
        return age


OLD = '{"name": "Ada", "age": 200}'
OLDER = '{"name": "Ada", "age": 300}'
FINE = '{"name": "Ada", "age": 36}'


@plait.function
def describe(s, retries=2, **options):
    s += user("Who?") + assistant("It is " + gen("person", type=Person, retries=retries, **options))
    s += user("And then?") + assistant(gen("more"))


def answers_in_order(backend, *texts):
    """Answers typed gens with `texts` in order, and others with " fine."; returns the prompts of the typed gens."""
    remaining, prompts = list(texts), []

    def answer(prompt, request):
        if request.constraint is None:
            return " fine."
        prompts.append(prompt)
        return remaining.pop(0)

    backend.scheduler.answer = answer
    return prompts


def test_refused_text_and_reason_are_in_the_next_prompt(backend):
    prompts = answers_in_order(backend, OLD, FINE)
    state = describe.run()
    assert state["person"] == Person(name="Ada", age=36)
    first, second = prompts
    assert second.startswith(first + OLD + "<<|im_end|>>\n<<|im_start|>>user\n"), "the prefix is that of the first"
    assert "age: Value error, nobody is that old" in second and "pydantic.dev" not in second
    assert second.endswith("<<|im_start|>>assistant\nIt is "), "the answer begins as the first one did"
    assert state.text().count("Ada") == 1 and OLD not in state.text()
    assert state.messages()[1] == {"role": "assistant", "content": "It is " + FINE}
    assert state["more"] == " fine."
    assert backend.scheduler.open_sessions() == 0


def test_what_follows_has_only_the_accepted_text(backend):
    answers_in_order(backend, OLD, FINE)
    seen = []
    typed = backend.scheduler.answer
    backend.scheduler.answer = lambda prompt, request: seen.append((prompt, request)) or typed(prompt, request)
    describe.run()
    (following,) = (prompt for prompt, request in seen if request.constraint is None)
    assert OLD not in following and f"It is {FINE}<<|im_end|>>" in following


def test_first_value_that_is_valid_is_asked_once(backend):
    prompts = answers_in_order(backend, FINE)
    state = describe.run()
    assert state["person"].age == 36 and len(prompts) == 1
    assert [attempt["error"] for attempt in state.get_meta_info("person")["attempts"]] == [None]


def test_last_refusal_carries_all_attempts(backend):
    answers_in_order(backend, OLD, OLDER)
    state = describe.run(retries=1)
    with pytest.raises(plait.UnreadableValue, match="2 attempts failed; the last one: age: Value error") as caught:
        state["person"]
    assert [attempt.text for attempt in caught.value.attempts] == [OLD, OLDER]
    assert all("nobody is that old" in attempt.reason for attempt in caught.value.attempts)
    assert caught.value.text == OLDER and isinstance(caught.value.__cause__, pydantic.ValidationError)
    assert OLDER in state.text() and OLD not in state.text() and state["more"] == " fine."


def test_error_without_retries_has_one_attempt(backend):
    answers_in_order(backend, OLD)
    with pytest.raises(plait.UnreadableValue) as caught:
        describe.run(retries=None)["person"]
    assert [attempt.text for attempt in caught.value.attempts] == [OLD]


def test_meta_info_and_usage_count_all_attempts(backend):
    answers_in_order(backend, OLD, FINE)
    state = describe.run()
    meta = state.get_meta_info("person")
    assert [attempt["text"] for attempt in meta["attempts"]] == [OLD, FINE]
    assert meta["attempts"][0]["error"].endswith("nobody is that old") and meta["attempts"][1]["error"] is None
    assert meta["completion_tokens"] == len(OLD) + len(FINE)
    assert meta["cached_tokens"] == sum(attempt["cached_tokens"] for attempt in meta["attempts"]) > 0
    assert state.usage.by_variable["person"].completion_tokens == len(OLD) + len(FINE)


def test_attempts_have_seeds_of_their_own(backend):
    answers_in_order(backend, OLD, OLDER, FINE)
    describe.run(seed=7, temperature=1)
    seeds = [request.sampling.seed for request in backend.scheduler.sent(Generate) if request.constraint is not None]
    assert seeds == [7, 8, 9]


def test_budget_counts_every_attempt(backend):
    answers_in_order(backend, OLD, OLDER, FINE)
    state = None
    with pytest.raises(plait.ProgramError) as caught:
        state = describe.run(budget=plait.Budget(tokens=len(OLD) + 5))
    assert state is None and isinstance(caught.value.__cause__, plait.BudgetExceeded)
    sent = [request for request in backend.scheduler.sent(Generate) if request.constraint is not None]
    assert [request.sampling.max_tokens for request in sent] == [len(OLD) + 5, 5]
    answers_in_order(backend, OLD, FINE)
    with pytest.raises(plait.ProgramError) as caught:
        describe.run(budget=plait.Budget(tokens=len(OLD)))
    assert isinstance(caught.value.__cause__, plait.BudgetExceeded), "nothing is left for a second attempt"


@dataclass
class Small:
    number: int

    def __post_init__(self) -> None:
        if self.number > 9:
            raise ValueError("too large")


def test_dataclass_without_turns(backend):
    prompts = answers_in_order(backend, '{"number": 10}', '{"number": 3}')

    @plait.function
    def program(s):
        s += "Ada.\nNumber: " + gen("small", type=Small, retries=1) + "."

    state = program.run()
    assert state["small"] == Small(3) and state.text() == 'Ada.\nNumber: {"number": 3}.'
    assert prompts[1].startswith(prompts[0] + '{"number": 10}\nThis answer is not valid: too large')
    assert prompts[1].endswith("\nNumber: "), "the last line leads to the value again"


def test_validator_that_fails_otherwise_is_raised_by_the_read(backend):
    @dataclass
    class Faulty:
        number: int

        def __post_init__(self) -> None:
            raise RuntimeError("no database")

    answers_in_order(backend, '{"number": 1}')

    @plait.function
    def program(s):
        s += "p" + gen("x", type=Faulty, retries=3)

    state = program.run()
    with pytest.raises(RuntimeError, match="no database"):
        state["x"]
    assert state.text() == 'p{"number": 1}'


def test_failed_attempt_fails_the_program(backend):
    answers_in_order(backend, OLD, RuntimeGone("gone"))
    with pytest.raises(plait.ProgramError, match=r"person.*gone"):
        describe.run()


def test_abort_ends_the_attempts(backend):
    gate = Gate(FINE)
    answers_in_order(backend, OLD, gate)
    state = describe.run(stream=True)
    assert gate.reached.wait(60)
    state.abort()
    with pytest.raises(plait.ProgramError) as caught:
        state["person"]
    assert isinstance(caught.value.__cause__, plait.Aborted)
    gate.open()


def test_async_program_and_text_stream(backend):
    answers_in_order(backend, OLD, FINE)

    @plait.function
    async def program(s):
        s += "p" + gen("person", type=Person, retries=1) + "." + gen("more")
        return (await s["person"]).age, await s.text()

    async def read():
        state = await program.arun(stream=True)
        return [piece async for piece in state.stream("person")], await state.text()

    pieces, text = asyncio.run(read())
    assert pieces == [FINE] and text == f"p{FINE}. fine."
    answers_in_order(backend, OLD, FINE)
    assert program.run().ret_value == (36, f"p{FINE}. fine.")


def test_compiled_program_retries_and_its_request_is_refused(backend):
    answers_in_order(backend, OLD, FINE)
    graph = describe.compile(retries=2)
    assert "gen person type=Person" in str(graph) and "retries=2" in str(graph)
    assert graph.run()["person"].age == 36
    with pytest.raises(plait.CompileError, match="retries need the validators"):
        graph.json()
    assert not graph.is_straight


def test_fork_goes_on_with_the_accepted_text(backend):
    answers_in_order(backend, OLD, FINE)

    @plait.function
    def program(s):
        s += "p" + gen("person", type=Person, retries=1)
        forks = s.fork(2)
        forks += lambda i: f"|{i}" + gen("x")
        forks.join("concate_and_append")

    assert program.run().text() == f"p{FINE}|0 fine.|1 fine."


def test_attempts_append_only_what_is_new(backend):
    answers_in_order(backend, OLD, FINE)
    describe.run()
    texts = ["".join(map(chr, request.token_ids)) for request in backend.scheduler.sent(Append)]
    assert sum("Who?" in text for text in texts) == 1, "the prefix is sent once"


def test_scripted_answers_are_given_in_order():
    with Scripted({"person": [OLD, FINE], "more": "Done."}) as script:
        state = describe.run()
        assert state["person"].age == 36 and state["more"] == "Done."
    assert [asked.name for asked in script.asked] == ["person", "person", "more"]


def test_resumed_state_has_the_attempts(backend, tmp_path):
    answers_in_order(backend, OLD, FINE, OLD, OLDER)
    items, file = [{"retries": 1}, {"retries": 1}], tmp_path / "batch.jsonl"
    fresh = describe.run_batch(items, resume=file, num_threads=1)
    resumed = describe.run_batch(items, resume=file)
    assert resumed[0]["person"] == fresh[0]["person"]
    assert resumed[0].get_meta_info("person") == fresh[0].get_meta_info("person")
    errors = []
    for state in (fresh[1], resumed[1]):
        with pytest.raises(plait.UnreadableValue) as caught:
            state["person"]
        errors.append(caught.value)
    assert errors[0].attempts == errors[1].attempts and len(errors[1].attempts) == 2


def test_validators_of_many_programs_run_side_by_side(backend):
    barrier = threading.Barrier(4, timeout=60)

    @dataclass
    class Slow:
        number: int

        def __post_init__(self) -> None:
            barrier.wait()

    backend.scheduler.answer = lambda prompt, request: '{"number": 1}'

    @plait.function
    def program(s):
        s += "p" + gen("x", type=Slow, retries=1)

    assert [state["x"].number for state in program.run_batch([{}] * 4)] == [1] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retries": 1}, "retries needs a type"),
        ({"retries": -1, "type": int}, "retries must be an integer from 0 to 32"),
        ({"retries": True, "type": int}, "retries must be an integer"),
        ({"retries": 1, "type": int, "n": 2}, "cannot be combined with n"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(plait.InputError, match=message):
        gen("x", **arguments)


def test_n_of_the_run_is_refused(backend):
    with pytest.raises(plait.ProgramError, match="cannot be combined with n"):
        describe.run(n=2)
