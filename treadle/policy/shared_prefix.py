"""Shared prefixes of rows: which tokens a network reads once for several rows.

The samples of a group repeat their prompt, and the forks of a session all that came before them. Rows are sorted so
that those with a common prefix stand side by side; what each shares with the one before it describes the whole tree. A
prefix is shared where that pays: it is not short, and the tokens that it saves are not few beside those that remain.
Knows ids and lengths, no network.
Invariant: the same rows always give the same tree. Some of its rows are a tree of their own, with the same branches:
what is counted for them is what they take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from treadle.model.prefix_attention import PrefixTree

SHORTEST = 16
"""Tokens of the shortest prefix that is shared: answers that begin alike by chance are no reason to branch."""

_WORTH = 16
"""A prefix is shared where it saves one token of so many: keys of a path are copied, at about that part of the cost."""


@dataclass(frozen=True, slots=True)
class _Node:
    """Rows `first` to `last` in the order of the tree, which have their first `depth` tokens in common."""

    first: int
    last: int
    depth: int
    parent: int = -1
    """The segment that holds the last of those tokens."""


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Some rows as a tree."""

    tree: PrefixTree
    pieces: tuple[tuple[int, int, int], ...]
    """Row and range of its tokens that each segment holds."""
    places: dict[int, Tensor]
    """For each row, where its tokens are among those of all segments."""


class SharedPrefixes:
    """The tree of all rows of a call. Rows without tokens are not in it."""

    def __init__(self, ids_S: Sequence[Tensor]) -> None:
        self.lengths = tuple(len(ids) for ids in ids_S)
        keys = {at: ids.numpy().tobytes() for at, ids in enumerate(ids_S) if len(ids)}
        self._order = sorted(keys, key=lambda at: (keys[at], at))
        common = [_common_prefix(ids_S[one], ids_S[other]) for one, other in pairwise(self._order)]
        self._shared = self._keep_worthy([0, *common]) if common else [0] * len(self._order)
        """For each row in order, the tokens that it shares with the one before it."""
        self._ranks = {row: at for at, row in enumerate(self._order)}

    def walk(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Some rows in the order of the tree, each with the tokens that it shares with the one before it."""
        ranks = sorted(self._ranks[row] for row in members if row in self._ranks)
        shared = [0, *(min(self._shared[one + 1 : other + 1]) for one, other in pairwise(ranks))]
        return [(self._order[rank], common) for rank, common in zip(ranks, shared, strict=False)]

    def count_tokens(self, members: Sequence[int]) -> int:
        """Tokens that a network reads for some rows in one forward."""
        return sum(self.lengths[row] - common for row, common in self.walk(members))

    def units(self, members: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        """Rows that stay together: neighbours in one tree, as many as have at most `limit` tokens, or one row."""
        units: list[list[int]] = []
        tokens = 0
        for row, common in self.walk(members):
            if common and tokens + self.lengths[row] - common <= limit:
                units[-1].append(row)
                tokens += self.lengths[row] - common
            else:
                units.append([row])
                tokens = self.lengths[row]
        return [tuple(sorted(unit)) for unit in units]

    def build_tree(self, members: Sequence[int]) -> TreeRows | None:
        """Some rows as a tree; None where they share nothing."""
        walked = self.walk(members)
        if not any(common for _, common in walked):
            return None
        rows, shared = [row for row, _ in walked], [common for _, common in walked]
        pieces: list[tuple[int, int, int]] = []
        parents: list[int] = []
        ends: dict[int, int] = {}
        waiting = _split(_Node(0, len(rows) - 1, 0), shared, 0)[::-1]
        while waiting:
            node = waiting.pop()
            inner = shared[node.first + 1 : node.last + 1]
            end = min(inner) if inner else self.lengths[rows[node.first]]
            parent = node.parent
            if end > node.depth:
                pieces.append((rows[node.first], node.depth, end))
                parents.append(parent)
                parent = len(pieces) - 1
            if inner:
                below = _Node(node.first, node.last, end, parent)
                waiting += _split(below, shared, end)[::-1]
            else:
                ends[rows[node.first]] = parent
        tree = PrefixTree(tuple(stop - start for _, start, stop in pieces), tuple(parents))
        paths = tree.paths()
        return TreeRows(tree, tuple(pieces), {row: paths[segment] for row, segment in ends.items()})

    def _keep_worthy(self, common: list[int]) -> list[int]:
        """What neighbours share, without the prefixes that are not worth it: shortened to the next worthy one."""
        kept = list(common)
        lengths = [self.lengths[row] for row in self._order]
        waiting = [_Node(0, len(common) - 1, 0)]
        while waiting:
            node = waiting.pop()
            inner = common[node.first + 1 : node.last + 1]
            if not inner:
                continue
            end = min(inner)
            children = _split(node, common, end)
            length = end - node.depth
            read = sum(lengths[node.first : node.last + 1]) - node.depth * (node.last - node.first + 1)
            worthy = length >= SHORTEST and (len(children) - 1) * length * _WORTH >= read
            depth = end if worthy else node.depth
            for child in children[1:]:
                kept[child.first] = depth
            waiting += [_Node(child.first, child.last, depth) for child in children]
        return kept


def _split(node: _Node, shared: Sequence[int], end: int) -> list[_Node]:
    """The rows of a node by what follows its first `end` tokens."""
    cuts = [at for at in range(node.first + 1, node.last + 1) if shared[at] == end]
    bounds = pairwise([node.first, *cuts, node.last + 1])
    return [_Node(first, after - 1, node.depth, node.parent) for first, after in bounds]


def _common_prefix(one: Tensor, other: Tensor) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.int().argmax()) if bool(differ.any()) else length
