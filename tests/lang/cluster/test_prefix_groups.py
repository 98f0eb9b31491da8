"""Items whose arguments begin alike are grouped, so that one engine computes what they share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.lang.cluster.prefix_groups import MIN_SHARED_CHARS, group_items, num_common_chars


def book(number):
    return f"{number} " + "Call me Ishmael. " * 40


def indexed(items):
    return dict(enumerate(items))


def test_questions_about_one_document_are_one_group():
    items = [{"question": f"Who is {at}?", "document": book(at % 3)} for at in range(9)]
    assert group_items(indexed(items)) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_what_all_items_share_makes_no_group():
    rules = "Answer in one sentence. " * 40
    items = [{"rules": rules, "document": book(at % 2), "question": f"{at}?"} for at in range(4)]
    assert group_items(indexed(items)) == [[0, 2], [1, 3]]
    assert group_items(indexed([{"rules": rules, "question": f"{at}?"} for at in range(3)])) == [[0], [1], [2]]
    begun = [{"text": rules + book(at % 2) + str(at)} for at in range(4)]
    assert group_items(indexed(begun)) == [[0, 2], [1, 3]]


def test_conversations_that_continue_another_are_neighbours():
    turns = [{"role": "user", "content": book(at)} for at in range(3)]
    items = [{"messages": turns[:length]} for length in (3, 1, 2)] + [{"messages": [{"role": "user", "content": "Hi"}]}]
    first, alone = group_items(indexed(items))
    assert sorted(first) == [0, 1, 2] and alone == [3]
    assert abs(first.index(0) - first.index(2)) == 1, "the two longest share most"


def test_short_and_equal_texts_stay_alone():
    assert group_items(indexed([{"n": 1}, {"n": 1}, {"n": 2}])) == [[0], [1], [2]]
    assert group_items({4: {}, 2: {}}) == [[4], [2]]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("ab"), st.sampled_from(["", "x", book(1), book(2), book(1) + "x", 7])),
        min_size=1,
    )
)
def test_groups_divide_the_items_and_share_text(items):
    groups = group_items(indexed(items))
    assert sorted(index for group in groups for index in group) == list(range(len(items)))
    assert [len(group) for group in groups] == sorted(map(len, groups), reverse=True)
    for group in groups:
        if len(group) > 1:
            shared = [num_common_chars(*(str(items[at].get(name, "")) for at in group[:2])) for name in "ab"]
            assert max(shared) >= MIN_SHARED_CHARS


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_num_common_chars(one, other):
    pairs = list(zip(one, other, strict=False))
    assert num_common_chars(one, other) == next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
