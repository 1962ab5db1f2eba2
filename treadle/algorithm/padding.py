"""Padding: a batch as padded tensors in verl's layout, for a trainer of your own.

treadle's own training packs sequences instead. Shapes: B rows (forks included), P longest prompt, R longest response.
Prompts are padded on the left, responses on the right, so that every response starts at column P.
"""

from collections.abc import Sequence
from typing import Any

import torch

from treadle.types import Batch, Row, Trajectory


def pad(
    batch: Batch, *, pad_token_id: int, prompt_length: int | None = None, response_length: int | None = None
) -> dict[str, torch.Tensor]:
    """`prompts`, `responses`, `response_mask`, `input_ids`, `attention_mask`, `position_ids`, `rollout_log_probs` and
    `rm_scores`, whose score stands on each row's last sampled token; a row without one has none. Failed trajectories
    have no rows here."""
    pairs = [(trajectory, row) for trajectory in batch.trajectories if trajectory.outcome.ok for row in trajectory.rows]
    if not pairs:
        raise ValueError("the batch has no trajectory that ended without failure")
    rows = [row for _, row in pairs]
    longest_prompt = _width("prompt_length", prompt_length, [len(row.prompt_ids) for row in rows])
    longest = _width("response_length", response_length, [len(row.ids) for row in rows])
    prompts = _matrix([row.prompt_ids for row in rows], longest_prompt, pad_token_id, left=True)
    prompt_mask = _matrix([[1] * len(row.prompt_ids) for row in rows], longest_prompt, 0, left=True)
    responses = _matrix([row.ids for row in rows], longest, pad_token_id)
    attention_mask = torch.cat([prompt_mask, _matrix([[1] * len(row.ids) for row in rows], longest, 0)], dim=1)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": _matrix([row.mask for row in rows], longest, 0),
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "rollout_log_probs": _matrix([row.logprobs for row in rows], longest, 0.0, dtype=torch.float32),
        "rm_scores": _matrix([_score(*pair) for pair in pairs], longest, 0.0, dtype=torch.float32),
    }


def _width(name: str, asked: int | None, lengths: Sequence[int]) -> int:
    longest = max(lengths)
    if asked is not None and asked < longest:
        raise ValueError(f"{name} {asked} is less than the longest row, {longest}")
    return asked or longest


def _score(trajectory: Trajectory, row: Row) -> list[float]:
    value = trajectory.reward.value if trajectory.reward else 0.0
    last = max((at for at, sampled in enumerate(row.mask) if sampled), default=-1)
    return [value if at == last else 0.0 for at in range(len(row.ids))]


def _matrix(
    rows: Sequence[Sequence[Any]], width: int, fill: float, *, left: bool = False, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    matrix = torch.full((len(rows), width), fill, dtype=dtype)
    for at, row in enumerate(rows):
        if row:
            start = width - len(row) if left else 0
            matrix[at, start : start + len(row)] = torch.tensor(row, dtype=dtype)
    return matrix
