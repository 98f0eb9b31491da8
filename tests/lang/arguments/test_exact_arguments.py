"""`exact` of `gen`, `select` and `run`: what is refused where it is written."""

from __future__ import annotations

import pytest

from plait import InputError, gen, greedy_token_selection, select


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: gen("x", exact=True), "exact needs a constraint"),
        (lambda: gen("x", type=str, exact=True), "exact needs a constraint"),
        (lambda: gen("x", regex="a+", exact=True, temperature=0), "exact .*temperature above 0"),
        (lambda: gen("x", regex="a+", exact=True, stop="b"), "exact cannot be combined with stop"),
        (lambda: gen("x", regex="a+", exact=True, return_logprob=True), "combined with return_logprob"),
        (lambda: gen("x", choices=["a", "b"], exact=True), "exact has no effect when choices are scored"),
        (lambda: select("x", ["a", "b"], seed=1), "seed has no effect without exact"),
        (lambda: select("x", ["a"], choices_method=greedy_token_selection, exact=True), "choices_method has no effect"),
    ],
)
def test_what_has_no_meaning_is_refused(make, text):
    with pytest.raises(InputError, match=text):
        make()


def test_what_has_a_meaning_is_taken():
    assert gen("x", regex="a+", exact=True).options.fields["exact"]
    assert gen("x", type=int, exact=True).options.fields["exact"]
    assert gen("x", choices=["a", "b"], temperature=1.0, exact=True).options.fields["exact"]
    assert select("x", ["a", "b"], exact=True, seed=3).method == "exact"
