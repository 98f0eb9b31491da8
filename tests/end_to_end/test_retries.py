"""`gen(retries=...)` on a scheduler with its prefix cache: an attempt computes only what is new in its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from chain_engine import chain_engine
from scripted_scheduler import byte_tokenizer

import plait
from plait import assistant, gen, user


@dataclass
class Booking:
    guests: int

    def __post_init__(self) -> None:
        raise ValueError("the house is full")


@plait.function
def book(s):
    s += user("A room, please. " * 20) + assistant(gen("booking", type=Booking, retries=2, max_tokens=40))
    s += user("Thanks.") + assistant(gen("more", max_tokens=3))


def test_attempts_compute_only_what_is_new():
    with chain_engine(byte_tokenizer()) as engine:
        state = book.run(backend=engine, temperature=0)
        first, second, third = state.get_meta_info("booking")["attempts"]
        for before, attempt in ((first, second), (second, third)):
            assert attempt["cached_tokens"] > before["prompt_tokens"]
            assert attempt["computed_tokens"] < 200 < attempt["prompt_tokens"]
        more = state.get_meta_info("more")
        assert more["computed_tokens"] < 100 and "This answer is not valid" not in state.text()
        with pytest.raises(plait.UnreadableValue) as caught:
            state["booking"]
        assert len(caught.value.attempts) == 3
