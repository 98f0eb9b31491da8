"""Random programs with nested forks, joins of both kinds and races; every gen has a text of its own before it."""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st

from plait import gen, race

# A program is a list of steps: "gen", "samples" (a gen with n=2), or (kind, branches) with a list of steps per branch.
CALLS = st.lists(st.sampled_from(["gen", "samples"]), min_size=1, max_size=2)
PROGRAMS = st.recursive(
    CALLS,
    lambda inner: st.lists(
        st.one_of(
            st.sampled_from(["gen", "samples"]),
            st.tuples(st.sampled_from(["fork", "race", "append"]), st.lists(inner, min_size=1, max_size=3)),
        ),
        min_size=1,
        max_size=3,
    ),
    max_leaves=8,
)


def write(s, steps, label, order):
    """Carries the steps out on `s`. The text before a gen ends with its label. `order(branches)`: writes them."""
    for number, step in enumerate(steps):
        here = f"{label}.{number}"
        if isinstance(step, str):
            s += f"({here})" + gen("x", n=2 if step == "samples" else 1)
            continue
        kind, branches = step
        group = s.fork(len(branches))
        work = [partial(write, branch, branches[i], f"{here}/{i}", order) for i, branch in enumerate(group.states)]
        order(work)
        if kind == "race":
            race(group).join()
        else:
            group.join("concate_and_append" if kind == "append" else "gather_variable")


def forwards(work):
    for item in work:
        item()
