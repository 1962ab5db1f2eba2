"""A batch in verl's padded layout, number by number."""

import pytest
import torch

from tests.rollouts import task
from treadle.algorithm.padding import pad
from treadle.errors import EngineFailure
from treadle.types import Batch, Group, Outcome, Row, Score, StopReason, Trajectory

DONE = Outcome.ended(StopReason.STOP)


def row(prompt: int, *mask: int) -> Row:
    ids = tuple(range(10, 10 + len(mask)))
    logprobs = tuple(-0.5 if bit else 0.0 for bit in mask)
    return Row(tuple(range(1, 1 + prompt)), ids, mask, logprobs, tuple(0 if bit else -1 for bit in mask))


def batch() -> Batch:
    scored = Trajectory("a", 0, (row(2, 1, 0, 1), row(3, 1)), DONE, Score(0.75))
    failed = Trajectory("a", 1, (row(9, 1),), Outcome.failed(EngineFailure("gone")))
    return Batch((Group(task("a"), (scored, failed)),))


def test_prompts_are_padded_left_and_responses_right():
    tensors = pad(batch(), pad_token_id=0)
    assert tensors["prompts"].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert tensors["responses"].tolist() == [[10, 11, 12], [10, 0, 0]]
    assert tensors["input_ids"].tolist() == [[0, 1, 2, 10, 11, 12], [1, 2, 3, 10, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert tensors["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 3]]


def test_masks_logprobs_and_scores_stand_on_their_tokens():
    tensors = pad(batch(), pad_token_id=0)
    assert tensors["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert tensors["rollout_log_probs"].tolist() == [[-0.5, 0.0, -0.5], [-0.5, 0.0, 0.0]]
    assert tensors["rm_scores"].tolist() == [[0.0, 0.0, 0.75], [0.75, 0.0, 0.0]]
    assert tensors["rm_scores"].dtype is torch.float32


def test_a_score_stands_on_a_sampled_token_also_where_an_observation_is_last():
    ended = Trajectory("a", 0, (row(2, 1, 1, 0, 0), row(1, 0)), DONE, Score(0.75))
    tensors = pad(Batch((Group(task("a"), (ended,)),)), pad_token_id=0)
    assert tensors["rm_scores"].tolist() == [[0.0, 0.75, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_lengths_may_be_given_and_must_hold_every_row():
    tensors = pad(batch(), pad_token_id=7, prompt_length=4, response_length=5)
    assert tensors["input_ids"].shape == (2, 9)
    with pytest.raises(ValueError, match="response_length 2 is less than the longest row, 3"):
        pad(batch(), pad_token_id=0, response_length=2)


def test_a_batch_without_survivors_is_refused():
    empty = Batch((Group(task("a"), batch().groups[0].trajectories[1:]),))
    with pytest.raises(ValueError, match="no trajectory"):
        pad(empty, pad_token_id=0)
