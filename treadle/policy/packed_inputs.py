"""Sequence packing: rows as a network reads them, without padding; mini batches and micro batches.

    T  response tokens of all rows, as in `protocol`    M  sampled tokens among them: those that have a loss
    L  tokens that a network reads in one forward

A row is read up to its last sampled token, and not that token itself: nothing after it is predicted. Rows with no
sampled token are not read at all. A prefix that rows share is read once where that is wanted (`shared_prefix`). A mini
batch is one optimizer step, a micro batch one forward of at most so many tokens, packed by best fit and balanced over
ranks. Knows no network.
Invariant: the same input always gives the same split; every row is in exactly one mini batch, and every row with
sampled tokens in exactly one micro batch; every rank has as many micro batches as any other. The M of a micro batch are
its rows' sampled tokens, in the order of the rows.
"""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import chain
from math import ceil

import torch
from torch import Tensor

from treadle.errors import ConfigError, Mistake, MisuseError
from treadle.model.prefix_attention import PrefixTree
from treadle.policy.shared_prefix import SharedPrefixes
from treadle.types import Row

_KINDS = {"b": torch.int8, "i": torch.int32, "f": torch.float32}


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows as a few flat tensors: what a network needs of them, ready to be sent."""

    ids: Tensor
    """Prompt and response of each row, row after row."""
    mask_T: Tensor
    logprobs_T: Tensor
    """As the engine reported them."""
    prompts: tuple[int, ...]
    """Tokens of each row's prompt."""
    responses: tuple[int, ...]
    processed_T: Tensor | None = None
    """Logprobs of the distribution sampled from; None where it is the whole softmax in every row."""

    @classmethod
    def of(cls, rows: "RowsLike") -> "FlatRows":
        """The inputs of rows in any form."""
        if isinstance(rows, FlatRows):
            return rows
        return cls(
            flatten("i", (part for row in rows for part in (row.prompt_ids, row.ids))),
            flatten("b", (row.mask for row in rows)).bool(),
            flatten("f", (row.logprobs for row in rows)),
            tuple(len(row.prompt_ids) for row in rows),
            tuple(len(row.mask) for row in rows),
            flatten("f", (row.processed_logprobs or row.logprobs for row in rows))
            if any(row.processed_logprobs for row in rows)
            else None,
        )


RowsLike = Sequence[Row] | FlatRows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some rows, packed into one forward."""

    ids_L: Tensor
    lengths: tuple[int, ...]
    """Of each row, in tokens read."""
    predicts_M: Tensor
    """The token of the forward whose hidden state predicts each sampled token."""
    targets_M: Tensor
    sequence_M: Tensor
    places_M: Tensor
    """Where each one is among the sampled tokens of all rows."""
    is_dummy: bool = False
    """A forward that does not count: it keeps a rank with too few rows in step with the others."""
    prefix_tree: PrefixTree | None = None
    """How rows share their prefixes; None where they are read one after the other."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def mask(self) -> Tensor:
        """Which of the sampled tokens count: all or none."""
        return torch.full_like(self.targets_M, not self.is_dummy, dtype=torch.bool)


class Sequences:
    """All rows of a call, ready to be packed."""

    def __init__(self, rows: RowsLike) -> None:
        flat = FlatRows.of(rows)
        self.mask_T = flat.mask_T
        self.logprobs_T = flat.logprobs_T
        self.processed_T = flat.processed_T
        masks = torch.split(self.mask_T, list(flat.responses))
        ids_S = torch.split(
            flat.ids.long(), [sum(lengths) for lengths in zip(flat.prompts, flat.responses, strict=True)]
        )
        self._sequences = [_read(*parts) for parts in zip(ids_S, masks, flat.prompts, strict=True)]
        self.lengths = tuple(len(ids) for ids, _, _ in self._sequences)
        """Tokens to read, for each row."""
        self.num_sampled = tuple(len(targets) for _, _, targets in self._sequences)
        counts = torch.tensor([0, *self.num_sampled])
        self._starts: list[int] = counts.cumsum(0).tolist()

    def sampled(self, values_T: Tensor) -> Tensor:
        """Per-token values of the sampled tokens only: [T] to [M]."""
        return values_T[self.mask_T]

    def spread(self, values_M: Tensor) -> Tensor:
        """Back to all response tokens, 0 where none was sampled: [M] to [T]."""
        return torch.zeros(len(self.mask_T), dtype=values_M.dtype).masked_scatter(self.mask_T, values_M)

    def sampled_by(self, members: Sequence[int]) -> Tensor:
        """Which sampled tokens the given rows have, as a mask: [M]."""
        mask_M = torch.zeros(self._starts[-1], dtype=torch.bool)
        for at in members:
            mask_M[self._starts[at] : self._starts[at + 1]] = True
        return mask_M

    @cached_property
    def prefixes(self) -> SharedPrefixes:
        """What rows share, found when it is first asked for."""
        return SharedPrefixes([ids for ids, _, _ in self._sequences])

    def pack(self, members: Sequence[int], device: torch.device, *, shared: bool = False) -> PackedRows:
        """The given rows as one forward, on `device`; `shared`: prefixes that they have in common are read once."""
        rows = [self._sequences[at] for at in members]
        lengths = tuple(len(ids) for ids, _, _ in rows)
        counts = torch.tensor([len(targets) for _, _, targets in rows])
        places = [torch.arange(self._starts[at], self._starts[at + 1]) for at in members]
        tree = self.prefixes.build_tree(members) if shared else None
        if tree is None:
            offsets = torch.tensor((0, *lengths)).cumsum(0).tolist()
            ids_L = torch.cat([ids for ids, _, _ in rows])
            predicts = [predicts + offset for (_, predicts, _), offset in zip(rows, offsets, strict=False)]
        else:
            ids_L = torch.cat([self._sequences[at][0][start:stop] for at, start, stop in tree.pieces])
            predicts = [tree.places[at][self._sequences[at][1]] for at in members]
        tensors = (
            ids_L,
            torch.cat(predicts),
            torch.cat([targets for _, _, targets in rows]),
            torch.arange(len(rows)).repeat_interleave(counts),
        )
        ids_L, predicts_M, targets_M, sequence_M = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return PackedRows(
            ids_L,
            lengths,
            predicts_M,
            targets_M,
            sequence_M,
            torch.cat(places),
            prefix_tree=None if tree is None else tree.tree,
        )

    def pack_dummy(self, device: torch.device) -> PackedRows:
        """The least that a network can read: one token, of which nothing counts."""
        zero = torch.zeros(1, dtype=torch.long, device=device)
        return PackedRows(zero, (1,), zero, zero, zero, torch.zeros(1, dtype=torch.long), is_dummy=True)


def flatten(kind: str, parts: Iterable[Iterable[float]]) -> Tensor:
    """Numbers of all parts in one tensor; `kind` is the array module's letter for their type."""
    numbers = array(kind, chain.from_iterable(parts))  # several times as fast as building a tensor from a list
    return torch.frombuffer(numbers, dtype=_KINDS[kind]) if numbers else torch.zeros(0, dtype=_KINDS[kind])


def _read(ids: Tensor, mask: Tensor, prompt: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ids to read, the places in them that predict, and what they predict."""
    sampled = mask.nonzero().squeeze(1)
    if not len(sampled):
        return ids[:0], sampled, ids[:0]
    if not prompt:
        raise MisuseError("a row without a prompt cannot train: nothing predicts its first token")
    predicts = sampled + (prompt - 1)
    return ids[: int(predicts[-1]) + 1], predicts, ids[predicts + 1]


Members = tuple[int, ...]
"""Indices of rows, rising."""


def pack_micro_batches(lengths: Sequence[int], budget: int, key: str) -> tuple[Members, ...]:
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


def balance_over_ranks(
    lengths: Sequence[int], budget: int, key: str, num_ranks: int
) -> tuple[tuple[Members, ...], ...]:
    """The micro batches of each rank, in as few rounds as even ones allow. One is empty where rows are too few.

    Ranks that share a network wait for each other in every round, so all micro batches are about the same size.
    """
    if num_ranks == 1:
        return (pack_micro_batches(lengths, budget, key),)
    _check_fit(lengths, budget, key)
    rows = sorted((at for at, length in enumerate(lengths) if length), key=lambda at: (-lengths[at], at))
    rounds = ceil(sum(lengths) / (num_ranks * budget))
    while (bins := _spread_evenly(rows, lengths, rounds * num_ranks, budget)) is None:
        rounds += 1
    bins = sorted(bins, key=lambda rows: (-sum(lengths[at] for at in rows), rows))
    turns = [bins[at * num_ranks : (at + 1) * num_ranks] for at in range(rounds)]
    # Every other round is dealt backwards, so that no rank has the largest every time.
    return tuple(
        tuple(turn[-1 - rank if at % 2 else rank] for at, turn in enumerate(turns)) for rank in range(num_ranks)
    )


def _spread_evenly(rows: Sequence[int], lengths: Sequence[int], num_bins: int, budget: int) -> list[Members] | None:
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


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """The micro batches of every rank."""

    ranks: tuple[tuple[Members, ...], ...]
    num_tokens: int
    """That networks read, over all ranks."""
    num_flat_tokens: int
    """That they would read if nothing was shared."""


def plan_flat(lengths: Sequence[int], members: Members, budget: int, key: str, num_ranks: int) -> MicroBatchPlan:
    """Micro batches of rows that are read one by one; `lengths` are those of all rows."""
    tokens = [lengths[at] for at in members]
    ranks = balance_over_ranks(tokens, budget, key, num_ranks)
    return MicroBatchPlan(_expand(ranks, [(at,) for at in members]), sum(tokens), sum(tokens))


def plan_shared(prefixes: SharedPrefixes, members: Members, budget: int, key: str, num_ranks: int) -> MicroBatchPlan:
    """Micro batches that keep rows with a common prefix together; smaller pieces of trees where ranks wait less so."""
    flat = plan_flat(prefixes.lengths, members, budget, key, num_ranks)
    if prefixes.count_tokens(members) == flat.num_tokens:
        return flat
    even = prefixes.count_tokens(members) // num_ranks
    limits = [budget] if num_ranks == 1 else sorted({min(budget, even // part) for part in (1, 2, 3, 4, 8)})
    found = []
    for limit in limits:
        units = prefixes.units(members, limit)
        ranks = balance_over_ranks([prefixes.count_tokens(unit) for unit in units], budget, key, num_ranks)
        expanded = _expand(ranks, units)
        tokens = [[prefixes.count_tokens(rows) for rows in bins] for bins in expanded]
        waits = sum(max(turn) for turn in zip(*tokens, strict=True))
        found.append((waits, -limit, MicroBatchPlan(expanded, sum(map(sum, tokens)), flat.num_tokens)))
    return min(found, key=lambda item: item[:2])[2]


def _expand(ranks: Sequence[Sequence[Members]], units: Sequence[Members]) -> tuple[tuple[Members, ...], ...]:
    return tuple(tuple(tuple(sorted(row for at in rows for row in units[at])) for rows in bins) for bins in ranks)


def split_mini_batches(group_S: Sequence[int], groups_per_batch: int) -> tuple[Members, ...]:
    """Mini batches of so many groups each, in order; the last takes what is left."""
    order = {group: at for at, group in enumerate(dict.fromkeys(group_S))}
    batches: list[list[int]] = [[] for _ in range(ceil(len(order) / groups_per_batch))]
    for row, group in enumerate(group_S):
        batches[order[group] // groups_per_batch].append(row)
    return tuple(tuple(rows) for rows in batches)


def split_shuffled_mini_batches(
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
