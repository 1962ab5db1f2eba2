"""The choice of a batch among open groups: kept counts choose what a search over all of them would."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from treadle.trainer.open_groups import OpenGroup, OpenGroups
from treadle.types import Group, Task

TASK = Task("t", ())
DONE = Group(TASK, ())


def search(items: list[OpenGroup], size: int, due: int | None) -> list[OpenGroup] | None:
    """The same choice by definition: every group is looked at, and every version counted over all of them."""
    chosen = sorted((item for item in items if item.group is not None), key=lambda item: item.version)[:size]
    if len(chosen) < size:
        return None
    for version in {item.version for item in items} if due is not None else ():
        assert due is not None
        later = (version - due) * size
        if count_until(version, items) - later > count_until(version, chosen):
            return None
    return [item for item in items if item in chosen]


def count_until(version: int, items: Iterable[OpenGroup]) -> int:
    return sum(item.version <= version for item in items)


def begin(groups: OpenGroups, position: int, version: int) -> OpenGroup:
    item = OpenGroup(position, TASK, version, 0.0)
    groups.add(item)
    return item


EVENTS = st.tuples(
    st.sampled_from(["begin", "begin", "end", "end", "end", "leave", "take"]), st.integers(0, 2), st.integers(0, 30)
)
"""What happens to groups, with how many versions after the oldest, or to which of them."""


@given(st.lists(EVENTS, min_size=20, max_size=80), st.integers(1, 3), st.booleans())
def test_counts_choose_what_a_search_over_all_groups_would(history, size, wait):
    groups = OpenGroups()
    due = 0
    for position, (kind, version, at) in enumerate(history):
        items = list(groups)
        item = items[at % len(items)] if items else None
        if kind == "begin":
            begin(groups, position, due + version)
        elif kind == "end" and item is not None and item.group is None:
            groups.end(item, DONE, due + version)
        elif kind == "leave" and item is not None:
            groups.remove(item)
        elif kind == "take" and (chosen := groups.choose(size, due if wait else None)):
            for item in chosen:
                groups.remove(item)
            due += 1
        expected = search(list(groups), size, due if wait else None)
        assert groups.choose(size, due if wait else None) == expected
        for bound in range(due, due + 6):
            assert groups.count_until(bound) == count_until(bound, groups)


def test_a_batch_waits_for_a_group_that_would_be_too_old_for_the_next():
    groups = OpenGroups()
    old = begin(groups, 0, version=0)
    for position in (1, 2):
        groups.end(begin(groups, position, version=1), DONE, 1)
    assert groups.choose(2, due=0) is None
    assert [item.position for item in groups.choose(2, due=-1) or ()] == [1, 2], "a batch later it is still in time"
    groups.end(old, DONE, 0)
    assert [item.position for item in groups.choose(2, due=0) or ()] == [0, 1]


def test_a_group_that_begins_again_is_the_last_of_its_version():
    groups = OpenGroups()
    first = begin(groups, 0, version=0)
    groups.end(begin(groups, 1, version=0), DONE, 0)
    groups.remove(first)
    groups.end(begin(groups, 0, version=0), DONE, 0)
    assert [item.position for item in groups.choose(1, due=None) or ()] == [1]
    assert [item.position for item in groups.choose(2, due=None) or ()] == [1, 0]
