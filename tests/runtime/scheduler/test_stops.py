"""The stop scanner against bytes.find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.scheduler.stops import StopScanner

word = st.text("ab", min_size=1, max_size=6)


@given(st.lists(word, max_size=4, unique=True), st.lists(st.text("ab", max_size=4), max_size=12))
def test_the_first_stop_completed_wins_whatever_the_pieces(stops, pieces):
    scanner, text, hit = StopScanner(tuple(stops)), "", None
    for piece in pieces:
        hit = scanner.push(piece.encode())
        text += piece
        if hit is not None:
            break
        longest = max(
            (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
        )  # the longest tail that may yet become a stop string
        assert scanner.num_safe == len(text) - longest
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert hit is None
    else:
        assert hit is not None
        _, start, stop = min(ends)
        assert (hit.start, hit.text) == (start, stop)
