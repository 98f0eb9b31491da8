"""Every public exception survives a copy and another process, with its attributes, its cause and its traceback."""

from __future__ import annotations

import copy
import multiprocessing
import traceback

import pytest
from raised_errors import (
    PLACE,
    example,
    public_classes,
    raise_it,
    raised,
    run_failing_program,
    same,
    with_foreign_cause,
)

import plait
from plait.runtime.errors import PlaitError
from plait.runtime.portable_error import LostCause

pytestmark = pytest.mark.timeout(300)
NAMES = sorted(public_classes())
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def pool():
    """One other process, which shares nothing with this one."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def attributes(error):
    return {name: value for name, value in vars(error).items() if name not in ("traceback_text", "__notes__")}


def assert_alike(error, original):
    assert type(error) is type(original) and str(error) == str(original) and error.args == original.args
    assert attributes(error) == attributes(original)
    if isinstance(original, PlaitError):
        assert type(error.__cause__) is LookupError and error.__cause__.args == ("no document", 4)
        assert error.__suppress_context__


def test_all_public_exceptions_are_walked():
    expected = {"PlaitError", "ProgramError", "MissingVariable", "UnreadableValue", "DependsOnValue", "BudgetExceeded"}
    expected |= {"InputError", "CallRejected", "QueueTimeout", "ModelNotFound", "GrammarError", "ReplayMismatch"}
    assert expected | {"UnsupportedControlFlow", "CompileQueueFull"} <= set(NAMES)
    assert attributes(example(public_classes()["UnreadableValue"])) == {
        "program": "qa",
        "variable": "age",
        "text": "12",
        "attempts": (),
        "place": PLACE,
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies(name, copied):
    original = raised(name)
    error = copied(original)
    assert error is not original
    assert_alike(error, original)
    if isinstance(original, PlaitError):
        assert error.__cause__ is original.__cause__ and error.__traceback__ is original.__traceback__


@pytest.mark.parametrize("name", NAMES)
def test_value_from_another_process(pool, name):
    """An error that a function returns, as `state.error()` does."""
    error = pool.apply_async(raised, (name,)).get(PATIENCE_S)
    assert_alike(error, raised(name))
    if isinstance(error, PlaitError):
        lost = error.__cause__.__cause__
        assert type(lost) is LostCause and str(lost) == "UnusualError: code 3"
        assert "raise UnusualError(code=3)" in error.traceback_text and "in raised" in error.traceback_text
        assert error.traceback_text in "".join(traceback.format_exception(error))
        again = pool.apply_async(same, (error,)).get(PATIENCE_S)
        assert_alike(again, error)
        assert again.traceback_text == error.traceback_text and again.__notes__ == error.__notes__


@pytest.mark.parametrize("name", NAMES)
def test_raised_in_a_pool(pool, name):
    with pytest.raises(public_classes()[name]) as caught:
        pool.apply_async(raise_it, (name,)).get(PATIENCE_S)
    assert attributes(caught.value) == attributes(raised(name))
    assert "raise UnusualError(code=3)" in str(caught.value.__cause__), "the pool puts the traceback in its place"


def test_failing_item_of_a_map_raises_in_the_parent(pool):
    with pytest.raises(plait.MissingVariable, match=r"no variable 'answr' \(did you mean 'answer'\?\)") as caught:
        pool.map_async(run_failing_program, range(3)).get(PATIENCE_S)
    assert caught.value.variable == "answr" and caught.value.place.filename.endswith("raised_errors.py")
    assert pool.map_async(run_failing_program, [0, 2]).get(PATIENCE_S) == ["answer 0", "answer 2"]


def test_cause_with_objects_that_cannot_travel(pool):
    error = pool.apply_async(with_foreign_cause).get(PATIENCE_S)
    assert type(error.__cause__) is LostCause and "ValueError: (<function" in str(error.__cause__)
    own = copy.deepcopy(with_foreign_cause())
    assert type(own.__cause__) is ValueError
