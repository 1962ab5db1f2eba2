"""Which rows are computed together: mini batches (one optimizer step each) and micro batches (one forward each).

Works on numbers alone: lengths, groups and seeds. Knows no tensors.
Invariant: the same input always gives the same split; every row is in exactly one mini batch, and every row with
something to compute in exactly one micro batch.
"""

import random
from collections.abc import Sequence
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
