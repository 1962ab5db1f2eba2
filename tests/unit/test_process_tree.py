"""Process trees: everything below a process is found, however it is nested."""

from collections.abc import Callable

import pytest

from treadle.process import tree
from treadle.sandbox.init import kernel

ListTree = Callable[[dict[int, set[int]]], list[int]]


@pytest.fixture(params=["ours", "a box's"])
def list_tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ListTree:
    """Lists what is below process 1, by the children of each."""

    def listed(children: dict[int, set[int]]) -> list[int]:
        monkeypatch.setattr(tree, "list_children", lambda pid: children.get(pid, set()))
        monkeypatch.setattr(kernel, "children", lambda pid: list(children.get(pid, ())))
        return tree.list_tree(1) if request.param == "ours" else kernel.tree(1)

    return listed


def test_a_chain_longer_than_the_stack_is_listed(list_tree: ListTree) -> None:
    """What a tool started may fork a child that forks a child: it must not escape from its end by that."""
    assert list_tree({pid: {pid + 1} for pid in range(1, 5000)}) == list(range(1, 5001))


def test_every_parent_comes_before_its_children(list_tree: ListTree) -> None:
    children = {1: {2, 3}, 2: {4, 5}, 3: {6}, 6: {7}}
    found = list_tree(children)
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7]
    assert all(found.index(parent) < found.index(child) for parent, own in children.items() for child in own)


def test_numbers_that_were_given_away_meanwhile_end_no_listing_in_a_circle(list_tree: ListTree) -> None:
    assert sorted(list_tree({1: {2}, 2: {3}, 3: {2, 1}})) == [1, 2, 3]
