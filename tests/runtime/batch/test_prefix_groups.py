"""Groups of rows that share a prefix: against all partitions of small batches, held by their pages alone."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.prefix_groups import PrefixGroup, PrefixGroups
from plait.runtime.batch.request import Request
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence

SPACE = ("", "")
MOST_ROWS = 6


class World:
    """Sequences that come, grow, fork, are published, cut and go, as the scheduler would have it."""

    def __init__(self):
        self.cache, self.rows = PrefixCache(400), []

    def come(self, tokens, computed):
        """A row over what is cached of `tokens`, its next `computed` tokens scheduled and published as prompts' are."""
        self.run(Sequence(SPACE, tokens), computed)

    def run(self, seq, computed):
        if len(self.rows) == MOST_ROWS or not len(seq):
            return
        self.cache.activate(seq, len(seq) - 1)
        self.cache.extend_from_cache(seq, len(seq) - 1)
        start = seq.num_computed
        assert self.cache.allocate(seq, min(computed, len(seq) - start))
        if seq.num_computed > start + 1:
            self.cache.publish_early(seq)
        self.rows.append(ScheduledRequest(Request(None, seq, 0, 0), start, seq.num_computed - start, 1))

    def act(self, kind, which, tokens):
        if kind == "come" or not self.rows:
            self.come(tokens, 1 + which)
            return
        at = which % len(self.rows)
        seq = self.rows[at].request.seq
        if kind == "go on":
            if seq.num_computed == len(seq):
                seq.tokens.extend([tokens[0]])
            self.cache.extend_from_cache(seq, len(seq) - 1)
            start = seq.num_computed
            assert self.cache.allocate(seq, 1)
            self.rows[at] = ScheduledRequest(self.rows[at].request, start, 1, 1)
        elif kind == "fork":
            child = self.cache.fork(seq)
            child.tokens.extend(tokens)
            self.act("go on", at, tokens)
            self.run(child, 1 + which)
        elif kind == "cut" and seq.num_computed > 1:
            self.cache.truncate(seq, seq.num_computed // 2 + 1)
            seq.tokens.truncate(seq.num_computed)
            self.act("go on", at, tokens)
        elif kind == "end":
            del self.rows[at]
            self.cache.free(seq)
        elif kind == "again":  # retracted, and computed again
            del self.rows[at]
            self.cache.release(seq)
            self.cache.flush()
            self.run(seq, 1 + which)


def shareable(rows, align):
    """[R, R]: how many leading tokens two rows have in the same pages, none of them new to either."""
    found = np.zeros((len(rows), len(rows)), dtype=int)
    for (i, a), (j, b) in itertools.combinations(enumerate(rows), 2):
        most, count = min(a.start, b.start), 0
        while count < most and a.request.seq.pages.view()[count] == b.request.seq.pages.view()[count]:
            count += 1
        found[i, j] = found[j, i] = count // align * align
    return found


def partitions(items):
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for part in partitions(rest):
        yield [[first], *part]
        for i in range(len(part)):
            yield [*part[:i], [first, *part[i]], *part[i + 1 :]]


def spared(group, common, group_cost):
    shared = min((int(common[i, j]) for i, j in itertools.combinations(group, 2)), default=0)
    return max(0, (len(group) - 1) * shared - group_cost)


def most_spared(rows, common, group_cost, max_row_tokens):
    narrow = [i for i, each in enumerate(rows) if each.count <= max_row_tokens]
    return max(sum(spared(group, common, group_cost) for group in part) for part in partitions(narrow))


deeds = st.tuples(
    st.sampled_from(["come", "come", "fork", "fork", "go on", "cut", "end", "again"]),
    st.integers(0, 9),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(deeds, max_size=14), st.sampled_from([1, 2, 4]), st.sampled_from([0, 3]), st.sampled_from([1, 3, 99]))
def test_no_other_split_spares_more(work, align, group_cost, max_row_tokens):
    world, kept = World(), PrefixGroups(align, group_cost, max_row_tokens)
    for deed in work:
        world.act(*deed)
        world.cache.check_integrity([each.request.seq for each in world.rows])
        found = kept.find(world.rows)
        common = shareable(world.rows, align)
        members = [row for group in found for row in group.rows]
        assert len(set(members)) == len(members)
        assert all(world.rows[row].count <= max_row_tokens for row in members)
        for rows, num_tokens in found:
            assert len(rows) > 1 and rows == sorted(rows)
            assert num_tokens % align == 0
            assert all(common[i, j] >= num_tokens > 0 for i, j in itertools.combinations(rows, 2))
        assert [g.num_spared for g in found] == sorted((g.num_spared for g in found), reverse=True)
        assert sum(g.num_spared - group_cost for g in found) == most_spared(
            world.rows, common, group_cost, max_row_tokens
        )


def decoding(world):
    """All that was computed is cache now, and every row brings one more token."""
    for i, each in enumerate(world.rows):
        seq = each.request.seq
        seq.tokens.extend([9])
        assert world.cache.allocate(seq, 1)
        world.rows[i] = ScheduledRequest(each.request, len(seq) - 1, 1, 1)


def test_the_drawing_of_the_header():
    world = World()
    prompt, question, example = [1] * 50, [2] * 10, [3] * 20
    for tail in ([*question, 4], [*question, 5], [*example, 6], [*example, 7]):
        world.come(prompt + tail, 99)
    decoding(world)
    assert PrefixGroups().find(world.rows) == [PrefixGroup([0, 1, 2, 3], 50)]
    assert PrefixGroups(align=8).find(world.rows) == [PrefixGroup([0, 1, 2, 3], 48)]
    world.rows = world.rows[::2]
    assert PrefixGroups().find(world.rows) == [PrefixGroup([0, 1], 50)]
    assert PrefixGroups(group_cost=50).find(world.rows) == []


def test_the_longer_prefixes_win_where_they_spare_more():
    world = World()
    for tail in ([2] * 90 + [4], [2] * 90 + [5], [3] * 90 + [6], [3] * 90 + [7]):
        world.come([1] * 10 + tail, 999)
    decoding(world)
    assert PrefixGroups().find(world.rows) == [PrefixGroup([0, 1], 100), PrefixGroup([2, 3], 100)]


def test_the_answer_is_kept_while_nobody_moves():
    """What is found again is the same object: nothing was computed."""
    world, groups = World(), PrefixGroups()
    for tail in (2, 3, 4):
        world.come([1] * 30 + [tail] * 3, 99)
    assert groups.find(world.rows) == [PrefixGroup([1, 2], 30)], "row 0 computes the prefix in this step"
    found = []
    for _ in range(4):
        decoding(world)
        found.append(groups.find(world.rows))
        assert found[-1] == [PrefixGroup([0, 1, 2], 30)]
        assert found[-1] is found[0]
    world.rows.pop()
    assert groups.find(world.rows) == [PrefixGroup([0, 1], 30)]
