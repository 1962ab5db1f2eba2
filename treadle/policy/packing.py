"""Which rows are computed together: mini batches (one optimizer step each) and micro batches (one forward each).

Works on numbers alone: lengths, groups and seeds. Knows no tensors.
Invariant: the same input always gives the same split; every row is in exactly one mini batch, and every row with
something to compute in exactly one micro batch. Every rank has as many micro batches as any other.
"""

import random
from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import ceil

from treadle.errors import ConfigError, Mistake

Members = tuple[int, ...]
"""Indices of rows, rising."""


def pack(lengths: Sequence[int], budget: int, key: str) -> tuple[Members, ...]:
    """Rows into as few micro batches of at most `budget` tokens as best-fit finds; `key` names the budget.

    The longest row is placed first, each into the fullest micro batch that still has room. Rows of length 0 are left
    out. Micro batches come in the order of their first row.
    """
    _check_fit(lengths, budget, key)
    room: list[int] = []
    bins: list[list[int]] = []
    for row in sorted((at for at, length in enumerate(lengths) if length), key=lambda at: (-lengths[at], at)):
        fitting = [at for at, left in enumerate(room) if left >= lengths[row]]
        if not fitting:
            fitting, room, bins = [len(room)], [*room, budget], [*bins, []]
        best = min(fitting, key=lambda at: room[at])
        room[best] -= lengths[row]
        bins[best].append(row)
    return tuple(sorted(tuple(sorted(rows)) for rows in bins))


def deal(lengths: Sequence[int], budget: int, key: str, num_ranks: int) -> tuple[tuple[Members, ...], ...]:
    """The micro batches of each rank, in as few rounds as even ones allow. One is empty where rows are too few.

    Ranks that share a network wait for each other in every round, so all micro batches are about the same size.
    """
    if num_ranks == 1:
        return (pack(lengths, budget, key),)
    _check_fit(lengths, budget, key)
    rows = sorted((at for at, length in enumerate(lengths) if length), key=lambda at: (-lengths[at], at))
    rounds = ceil(sum(lengths) / (num_ranks * budget))
    while (bins := _spread(rows, lengths, rounds * num_ranks, budget)) is None:
        rounds += 1
    bins = sorted(bins, key=lambda rows: (-sum(lengths[at] for at in rows), rows))
    turns = [bins[at * num_ranks : (at + 1) * num_ranks] for at in range(rounds)]
    # Every other round is dealt backwards, so that no rank has the largest every time.
    return tuple(
        tuple(turn[-1 - rank if at % 2 else rank] for at, turn in enumerate(turns)) for rank in range(num_ranks)
    )


def _spread(rows: Sequence[int], lengths: Sequence[int], num_bins: int, budget: int) -> list[Members] | None:
    """Each row into the micro batch with the fewest tokens; None where one then has too many."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, at) for at in range(num_bins)]
    heapify(loads)
    for row in rows:
        load, at = loads[0]
        if load + lengths[row] > budget:
            return None
        heapreplace(loads, (load + lengths[row], at))
        bins[at].append(row)
    return [tuple(sorted(members)) for members in bins]


def _check_fit(lengths: Sequence[int], budget: int, key: str) -> None:
    longest = max(lengths, default=0)
    if longest > budget:
        problem = f"{budget} tokens hold no row of {longest}"
        raise ConfigError([Mistake(key, problem, budget, fix=f"raise it to {longest} or more")])


def split_in_order(group_S: Sequence[int], groups_per_batch: int) -> tuple[Members, ...]:
    """Mini batches of so many groups each, in order; the last takes what is left."""
    order = {group: at for at, group in enumerate(dict.fromkeys(group_S))}
    batches: list[list[int]] = [[] for _ in range(ceil(len(order) / groups_per_batch))]
    for row, group in enumerate(group_S):
        batches[order[group] // groups_per_batch].append(row)
    return tuple(tuple(rows) for rows in batches)


def split_shuffled(
    group_S: Sequence[int], trajectory_S: Sequence[int], groups_per_batch: int, seed: str
) -> tuple[Members, ...]:
    """As many mini batches as in order, of shuffled trajectories: sizes differ by one at most."""
    num_batches = ceil(len(set(group_S)) / groups_per_batch)
    trajectories = list(dict.fromkeys(trajectory_S))
    random.Random(seed).shuffle(trajectories)
    home = {trajectory: at % num_batches for at, trajectory in enumerate(trajectories)}
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    for row, trajectory in enumerate(trajectory_S):
        batches[home[trajectory]].append(row)
    return tuple(tuple(rows) for rows in batches)
