import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import ConfigError
from treadle.policy.packed_inputs import (
    balance_over_ranks,
    pack_micro_batches,
    split_mini_batches,
    split_shuffled_mini_batches,
)

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@given(LENGTHS)
def test_every_row_with_tokens_is_in_one_micro_batch_within_the_budget(lengths: list[int]) -> None:
    packed = pack_micro_batches(lengths, 50, "key")
    assert sorted(row for rows in packed for row in rows) == [at for at, length in enumerate(lengths) if length]
    assert all(sum(lengths[row] for row in rows) <= 50 for rows in packed)


@given(LENGTHS)
def test_budgets_are_filled(lengths: list[int]) -> None:
    """No two micro batches would fit into one."""
    totals = sorted(sum(lengths[row] for row in rows) for rows in pack_micro_batches(lengths, 50, "key"))
    assert len(totals) < 2 or totals[0] + totals[1] > 50


@given(LENGTHS)
def test_packing_is_the_same_each_time(lengths: list[int]) -> None:
    assert pack_micro_batches(lengths, 50, "key") == pack_micro_batches(list(lengths), 50, "key")


def test_a_row_over_the_budget_names_the_key_and_the_length() -> None:
    with pytest.raises(ConfigError, match=r"actor\.ppo_max_token_len_per_gpu: 50 tokens hold no row of 51"):
        pack_micro_batches([3, 51], 50, "actor.ppo_max_token_len_per_gpu")


def test_mini_batches_take_groups_in_order_and_the_last_takes_the_rest() -> None:
    assert split_mini_batches([0, 0, 1, 3, 3, 4], 2) == ((0, 1, 2), (3, 4, 5))
    assert split_mini_batches([0, 1, 2], 2) == ((0, 1), (2,))


def test_shuffled_mini_batches_keep_forks_together_and_are_even() -> None:
    group_S, trajectory_S = [0, 0, 0, 1, 1, 2, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6]
    batches = split_shuffled_mini_batches(group_S, trajectory_S, 2, "seed")
    assert sorted(row for rows in batches for row in rows) == list(range(8))
    assert sum({0, 1} <= set(rows) for rows in batches) == 1
    assert sorted(len({trajectory_S[row] for row in rows}) for rows in batches) == [3, 4]


def test_the_seed_decides_the_shuffle() -> None:
    rows = list(range(20))
    assert split_shuffled_mini_batches(rows, rows, 5, "a") == split_shuffled_mini_batches(rows, rows, 5, "a")
    assert split_shuffled_mini_batches(rows, rows, 5, "a") != split_shuffled_mini_batches(rows, rows, 5, "b")


RANKS = st.integers(2, 5)


@given(LENGTHS, RANKS)
def test_every_row_with_tokens_is_dealt_to_one_rank_within_the_budget(lengths: list[int], num_ranks: int) -> None:
    dealt = balance_over_ranks(lengths, 50, "key", num_ranks)
    members = sorted(row for bins in dealt for rows in bins for row in rows)
    assert members == [at for at, length in enumerate(lengths) if length]
    assert all(sum(lengths[row] for row in rows) <= 50 for bins in dealt for rows in bins)
    assert all(rows == tuple(sorted(rows)) for bins in dealt for rows in bins)


@given(LENGTHS, RANKS)
def test_every_rank_has_as_many_micro_batches(lengths: list[int], num_ranks: int) -> None:
    dealt = balance_over_ranks(lengths, 50, "key", num_ranks)
    assert len(dealt) == num_ranks and len({len(bins) for bins in dealt}) == 1
    assert dealt == balance_over_ranks(list(lengths), 50, "key", num_ranks)


@given(LENGTHS, RANKS)
def test_ranks_wait_little_for_each_other(lengths: list[int], num_ranks: int) -> None:
    """No two micro batches differ by more than the longest row: the last one put into the fullest."""
    loads = [
        sum(lengths[row] for row in rows) for bins in balance_over_ranks(lengths, 50, "key", num_ranks) for rows in bins
    ]
    assert max(loads, default=0) - min(loads, default=0) <= max(lengths, default=0)


def test_even_rows_need_no_more_rounds_than_their_tokens_do() -> None:
    assert [len(bins) for bins in balance_over_ranks([10] * 20, 50, "key", 2)] == [2, 2]
    assert [len(bins) for bins in balance_over_ranks([10] * 21, 50, "key", 2)] == [3, 3]


def test_a_rank_without_rows_has_an_empty_micro_batch() -> None:
    assert balance_over_ranks([7], 50, "key", 3) == (((0,),), ((),), ((),))
    assert balance_over_ranks([0, 0], 50, "key", 2) == ((), ())


def test_one_rank_packs_as_one_device() -> None:
    lengths = [30, 20, 40, 10, 25]
    assert balance_over_ranks(lengths, 50, "key", 1) == (pack_micro_batches(lengths, 50, "key"),)


def test_a_row_over_the_budget_is_refused_for_ranks_too() -> None:
    with pytest.raises(ConfigError, match=r"actor\.ppo_max_token_len_per_gpu: 50 tokens hold no row of 51"):
        balance_over_ranks([3, 51], 50, "actor.ppo_max_token_len_per_gpu", 2)
