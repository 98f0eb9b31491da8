"""Prefix groups, compared with the best of all partitions of small batches."""

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

NAMESPACE = ("", "")
MAX_ROWS = 6


class BatchSimulation:
    """Scheduled requests whose sequences are added, extended, forked, published, truncated and freed."""

    def __init__(self):
        self.cache, self.rows = PrefixCache(400), []

    def add(self, tokens, computed):
        """Adds a row that uses the cached part of `tokens`; schedules and publishes its next `computed` tokens."""
        self.schedule(Sequence(NAMESPACE, tokens), computed)

    def schedule(self, seq, computed):
        if len(self.rows) == MAX_ROWS or not len(seq):
            return
        self.cache.activate(seq, len(seq) - 1)
        self.cache.extend_from_cache(seq, len(seq) - 1)
        start = seq.num_computed
        assert self.cache.allocate(seq, min(computed, len(seq) - start))
        if seq.num_computed > start + 1:
            self.cache.publish_early(seq)
        self.rows.append(ScheduledRequest(Request(None, seq, 0, 0), start, seq.num_computed - start, 1))

    def act(self, kind, which, tokens):
        if kind == "add" or not self.rows:
            self.add(tokens, 1 + which)
            return
        index = which % len(self.rows)
        seq = self.rows[index].request.seq
        if kind == "decode":
            if seq.num_computed == len(seq):
                seq.tokens.extend([tokens[0]])
            self.cache.extend_from_cache(seq, len(seq) - 1)
            start = seq.num_computed
            assert self.cache.allocate(seq, 1)
            self.rows[index] = ScheduledRequest(self.rows[index].request, start, 1, 1)
        elif kind == "fork":
            child = self.cache.fork(seq)
            child.tokens.extend(tokens)
            self.act("decode", index, tokens)
            self.schedule(child, 1 + which)
        elif kind == "truncate" and seq.num_computed > 1:
            self.cache.truncate(seq, seq.num_computed // 2 + 1)
            seq.tokens.truncate(seq.num_computed)
            self.act("decode", index, tokens)
        elif kind == "free":
            del self.rows[index]
            self.cache.free(seq)
        elif kind == "retract":
            del self.rows[index]
            self.cache.release(seq)
            self.cache.flush()
            self.schedule(seq, 1 + which)


def shareable(rows, align):
    """[R, R]: how many leading cached tokens of two rows are in the same pages."""
    lengths = np.zeros((len(rows), len(rows)), dtype=int)
    for (i, a), (j, b) in itertools.combinations(enumerate(rows), 2):
        num_cached, count = min(a.start, b.start), 0
        while count < num_cached and a.request.seq.pages.view()[count] == b.request.seq.pages.view()[count]:
            count += 1
        lengths[i, j] = lengths[j, i] = count // align * align
    return lengths


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


def max_spared(rows, common, group_cost, max_row_tokens):
    candidates = [i for i, row in enumerate(rows) if row.count <= max_row_tokens]
    return max(sum(spared(group, common, group_cost) for group in part) for part in partitions(candidates))


actions = st.tuples(
    st.sampled_from(["add", "add", "fork", "fork", "decode", "truncate", "free", "retract"]),
    st.integers(0, 9),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, max_size=14), st.sampled_from([1, 2, 4]), st.sampled_from([0, 3]), st.sampled_from([1, 3, 99]))
def test_no_partition_saves_more(work, align, group_cost, max_row_tokens):
    batch, prefix_groups = BatchSimulation(), PrefixGroups(align, group_cost, max_row_tokens)
    for action in work:
        batch.act(*action)
        batch.cache.check_integrity([row.request.seq for row in batch.rows])
        groups = prefix_groups.find(batch.rows)
        common = shareable(batch.rows, align)
        members = [row for group in groups for row in group.rows]
        assert len(set(members)) == len(members)
        assert all(batch.rows[row].count <= max_row_tokens for row in members)
        for rows, num_tokens in groups:
            assert len(rows) > 1 and rows == sorted(rows)
            assert num_tokens % align == 0
            assert all(common[i, j] >= num_tokens > 0 for i, j in itertools.combinations(rows, 2))
        assert [g.num_saved_reads for g in groups] == sorted((g.num_saved_reads for g in groups), reverse=True)
        assert sum(g.num_saved_reads - group_cost for g in groups) == max_spared(
            batch.rows, common, group_cost, max_row_tokens
        )


def decode_all(batch):
    """Schedules one more token of every row."""
    for i, row in enumerate(batch.rows):
        seq = row.request.seq
        seq.tokens.extend([9])
        assert batch.cache.allocate(seq, 1)
        batch.rows[i] = ScheduledRequest(row.request, len(seq) - 1, 1, 1)


def test_the_example_in_the_docstring_of_the_module():
    batch = BatchSimulation()
    prompt, question, example = [1] * 50, [2] * 10, [3] * 20
    for tail in ([*question, 4], [*question, 5], [*example, 6], [*example, 7]):
        batch.add(prompt + tail, 99)
    decode_all(batch)
    assert PrefixGroups().find(batch.rows) == [PrefixGroup([0, 1, 2, 3], 50)]
    assert PrefixGroups(align=8).find(batch.rows) == [PrefixGroup([0, 1, 2, 3], 48)]
    batch.rows = batch.rows[::2]
    assert PrefixGroups().find(batch.rows) == [PrefixGroup([0, 1], 50)]
    assert PrefixGroups(group_cost=50).find(batch.rows) == []


def test_longer_prefixes_are_chosen_if_they_save_more():
    batch = BatchSimulation()
    for tail in ([2] * 90 + [4], [2] * 90 + [5], [3] * 90 + [6], [3] * 90 + [7]):
        batch.add([1] * 10 + tail, 999)
    decode_all(batch)
    assert PrefixGroups().find(batch.rows) == [PrefixGroup([0, 1], 100), PrefixGroup([2, 3], 100)]


def test_groups_are_reused_while_positions_do_not_change():
    """The same list object is returned."""
    batch, groups = BatchSimulation(), PrefixGroups()
    for tail in (2, 3, 4):
        batch.add([1] * 30 + [tail] * 3, 99)
    assert groups.find(batch.rows) == [PrefixGroup([1, 2], 30)], "row 0 computes the prefix in this step"
    results = []
    for _ in range(4):
        decode_all(batch)
        results.append(groups.find(batch.rows))
        assert results[-1] == [PrefixGroup([0, 1, 2], 30)]
        assert results[-1] is results[0]
    batch.rows.pop()
    assert groups.find(batch.rows) == [PrefixGroup([0, 1], 30)]
