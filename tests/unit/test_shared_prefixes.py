"""How rows with common prefixes are spread over ranks and micro batches, over random groups and forks."""

import random

import pytest
import torch
from torch import Tensor

from treadle.policy.packed_inputs import MicroBatchPlan, plan_flat, plan_shared
from treadle.policy.shared_prefix import SharedPrefixes


def make_rows(rng: random.Random) -> list[Tensor]:
    """Groups with prompts in common, some rows that begin as far as a part of the row before, some without a token."""
    rows: list[list[int]] = []
    for _ in range(rng.randint(1, 6)):
        prompt = [rng.randrange(50) for _ in range(rng.randint(0, 60))]
        for _ in range(rng.randint(1, 6)):
            forks = rows and rng.random() < 0.2
            start = rows[-1][: rng.randint(0, len(rows[-1]))] if forks else prompt
            rows.append(start + [rng.randrange(50) for _ in range(rng.randint(0, 30))])
    return [torch.tensor(row, dtype=torch.long) for row in rows]


def batches(plan: MicroBatchPlan) -> list[tuple[int, ...]]:
    return [batch for rank in plan.ranks for batch in rank]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_row_is_in_one_micro_batch_within_the_budget(num_ranks: int) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        rows = make_rows(rng)
        members = tuple(sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows)))))
        budget = max(1, max(map(len, rows))) + rng.randint(0, 200)
        prefixes = SharedPrefixes(rows)
        plan = plan_shared(prefixes, members, budget, "key", num_ranks)
        counted = [prefixes.count_tokens(batch) for batch in batches(plan)]
        assert sorted(row for batch in batches(plan) for row in batch) == [row for row in members if len(rows[row])]
        assert len({len(rank) for rank in plan.ranks}) == 1
        assert max(counted) <= budget
        assert sum(counted) == plan.num_tokens <= plan_flat(prefixes.lengths, members, budget, "key", 1).num_tokens


def test_the_tree_of_a_micro_batch_has_the_tokens_of_its_rows() -> None:
    trees = 0
    for seed in range(60):
        rows = make_rows(random.Random(seed))
        prefixes = SharedPrefixes(rows)
        plan = plan_shared(prefixes, tuple(range(len(rows))), 150, "key", 2)
        for batch in batches(plan):
            tree = prefixes.build_tree(batch) if batch else None
            if tree is None:
                continue
            trees += 1
            flat = torch.cat([rows[row][start:stop] for row, start, stop in tree.pieces])
            assert sum(tree.tree.lengths) == prefixes.count_tokens(batch) == len(flat)
            assert all(torch.equal(flat[tree.places[row]], rows[row]) for row in batch)
    assert trees > 60
