"""Advantage inputs: rewards, turns and groups of a batch, packed flat on the CPU; returns; dynamic sampling; seats.

    T  response tokens of all rows, row after row    S  sequences (rows)    N  trajectories    G  groups
    K  turns of the longest trajectory    F  parts of the reward    L  sampled tokens of the longest sequence

Owns the records, their order, and what estimators share: sums by group, discounted returns, and whether a group has
signal (`algorithm.filter_groups`). A failed trajectory never gets here: groups hold survivors only, and may differ in
size. Rows of one trajectory (forks) share its advantage, and it counts once in any baseline. Statistics are taken in
float64, of rewards in float32: the mean of equal rewards is exactly that reward.

Discounting runs over sampled tokens only: the token after a sampled one is the next sampled one, observations are
skipped. A trajectory's reward is on the last sampled token of each of its rows, also where a limit cut it short. With
`by_turn`, the reward of a turn is on that turn's last sampled token instead.

An episode of several agents becomes one group for each seat: trajectories of single agents, the rows of a seat with the
rewards of that seat, compared with the same seat in the other samples of the task. So an advantage says how well a seat
was played, and not which seat is the better one. What reward functions gave belongs to the whole episode, and to every
seat alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import torch
from torch import Tensor

from treadle.algorithm.micro_batch import count_by_sequence
from treadle.config.reward import SESSION_PARTS, RewardConfig
from treadle.config.training import AlgorithmConfig
from treadle.errors import ConfigError, Mistake, MisuseError, nearest
from treadle.types import NOTHING, Group, Row, Score, Trajectory


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """A batch's rewards and how its tokens, sequences, trajectories and groups belong together."""

    rewards_N: Tensor
    group_N: Tensor
    num_groups: int
    trajectory_S: Tensor
    sequence_T: Tensor
    """Never falls: the tokens of a sequence stand together, in order."""
    mask_T: Tensor
    token_rewards_T: Tensor | None = None
    """What single tokens get beside the trajectory's reward, such as KL penalties."""
    values_T: Tensor | None = None
    """What the value model expected before each token, for gae."""
    baselines_G: Tensor | None = None
    """The reward of each group's greedy answer, for remax; NaN where that answer failed."""
    gradient_norms_T: Tensor | None = None
    """What `Policy.gradient_norms` says of each token, for optimal_token_baseline."""
    log_ratios_T: Tensor | None = None
    """log(policy / reference) of each token, before the step, for dpo and ipo."""

    def __post_init__(self) -> None:
        assert self.sequence_T.shape == self.mask_T.shape, "one sequence index for each token"
        assert bool((self.sequence_T.diff() >= 0).all()), "the tokens of a sequence must stand together"

    turn_rewards_T: Tensor | None = None
    """The share of `rewards_N` that was given for single turns, on the last token that each of them sampled; None where
    no turn was given any."""
    turn_T: Tensor | None = None
    """Which turn of its trajectory each token belongs to; the rows of forks count as the first."""
    num_turns_N: Tensor | None = None
    parts_NF: Tensor | None = None
    """The parts of each reward, before their weights, for gdpo."""
    part_weights_F: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.trajectory_S)

    @property
    def num_trajectories(self) -> int:
        return len(self.rewards_N)

    @property
    def trajectory_T(self) -> Tensor:
        return self.trajectory_S[self.sequence_T]

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        *,
        token_rewards_T: Tensor | None = None,
        values_T: Tensor | None = None,
        baselines_G: Tensor | None = None,
        reward: RewardConfig = RewardConfig(),  # noqa: B008  frozen
    ) -> "AdvantageInputs":
        """The inputs of a batch of groups; tokens in the order of `rows_of`. `reward` has the weights of its parts."""
        members = [(at, trajectory) for at, group in enumerate(groups) for trajectory in group.survivors]
        rows = [(at, row) for at, (_, trajectory) in enumerate(members) for row in trajectory.rows]
        lengths = torch.tensor([len(row.ids) for _, row in rows], dtype=torch.int64)
        scores = [_score_of(trajectory) for _, trajectory in members]
        weights = {**reward.weights(), **reward.session_weights()}
        names = [name for name in weights if any(name in score.parts for score in scores)]
        parts = [[score.parts.get(name, 0.0) for name in names] or [score.value] for score in scores]
        return cls(
            rewards_N=torch.tensor([score.value for score in scores], dtype=torch.float32),
            group_N=torch.tensor([at for at, _ in members], dtype=torch.int64),
            num_groups=len(groups),
            trajectory_S=torch.tensor([at for at, _ in rows], dtype=torch.int64),
            sequence_T=torch.arange(len(rows)).repeat_interleave(lengths),
            mask_T=torch.tensor([flag for _, row in rows for flag in row.mask], dtype=torch.bool),
            token_rewards_T=token_rewards_T,
            values_T=values_T,
            baselines_G=baselines_G,
            turn_rewards_T=_place_turn_rewards([row for _, row in rows], reward.session_weights()),
            turn_T=_number_turns([trajectory for _, trajectory in members]),
            num_turns_N=torch.tensor([max(1, len(item.rows[0].turns) if item.rows else 1) for _, item in members]),
            parts_NF=torch.tensor(parts, dtype=torch.float32),
            part_weights_F=torch.tensor([weights[name] for name in names] or [1.0], dtype=torch.float64),
        )


def _score_of(trajectory: Trajectory) -> Score:
    if trajectory.reward is None:
        raise MisuseError(f"trajectory {trajectory.uid}/{trajectory.sample} has no reward: name some functions")
    return trajectory.reward


def _place_turn_rewards(rows: Sequence[Row], weights: Mapping[str, float]) -> Tensor | None:
    """What each turn of these rows was given, T, on its last sampled token; None where that is nothing at all.

    A turn that sampled no token has no place of its own: its share stays with the end of the row.
    """
    placed: list[float] = []
    for row in rows:
        rewards = [0.0] * len(row.ids)
        for turn in row.turns:
            given = weights["environment"] * (turn.reward or 0.0)
            given += weights["tools"] * sum(result.reward or 0.0 for result in turn.results)
            if given and turn.sampled_end > turn.start:
                rewards[turn.sampled_end - 1] += given
        placed += rewards
    return torch.tensor(placed, dtype=torch.float64) if any(placed) else None


def _number_turns(trajectories: Sequence[Trajectory]) -> Tensor:
    numbers: list[int] = []
    for trajectory in trajectories:
        for at, row in enumerate(trajectory.rows):
            turns = [0] * len(row.ids)
            for number, turn in enumerate(row.turns if at == 0 else ()):
                turns[turn.start : turn.end] = [number] * (turn.end - turn.start)
            numbers += turns
    return torch.tensor(numbers, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Advantages:
    """One advantage per token, 0 where it was not sampled."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
    """What the value model should have expected, from gae."""


AdvantageEstimator = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]


def rows_of(groups: Sequence[Group]) -> tuple[Row, ...]:
    """Every row that trains, in the order that all flat tensors of the batch follow."""
    return tuple(row for group in groups for trajectory in group.survivors for row in trajectory.rows)


def add_up(values: Tensor, index: Tensor, size: int) -> Tensor:
    """One float64 sum for each index, of numbers or of rows."""
    return torch.zeros((size, *values.shape[1:]), dtype=torch.float64).index_add(0, index, values.double())


def score(inputs: AdvantageInputs) -> Tensor:
    """What each trajectory got in all, N: its reward, and what its sampled tokens got in any of its rows."""
    scores_N = inputs.rewards_N.double()
    if inputs.token_rewards_T is None:
        return scores_N
    gained_T = torch.where(inputs.mask_T, inputs.token_rewards_T, 0)
    return scores_N + add_up(gained_T, inputs.trajectory_T, inputs.num_trajectories)


def scores_to_go(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """What each trajectory gets from each of its turns on, N × K, 0 for turns that it did not have.

    One column, of whole trajectories, unless `algorithm.advantage_level` is turn.
    """
    scores_N = score(inputs)
    if algorithm.advantage_level == "trajectory" or inputs.turn_T is None or inputs.num_turns_N is None:
        return scores_N.unsqueeze(1)
    turns_K = torch.arange(int(inputs.num_turns_N.max()) if len(scores_N) else 1)
    scores_NK = scores_N.unsqueeze(1).repeat(1, len(turns_K))
    if inputs.turn_rewards_T is not None:
        first_T = ~is_fork(inputs)[inputs.sequence_T]
        cells_T = inputs.trajectory_T * len(turns_K) + inputs.turn_T
        given_T = torch.where(first_T, inputs.turn_rewards_T, 0)
        given_NK = add_up(given_T, cells_T, scores_NK.numel()).view_as(scores_NK)
        scores_NK = scores_NK - (given_NK.cumsum(1) - given_NK)
    return torch.where(turns_K < inputs.num_turns_N.unsqueeze(1), scores_NK, 0)


def is_fork(inputs: AdvantageInputs) -> Tensor:
    """Whether each sequence is a further row of its trajectory, S."""
    before_S = torch.nn.functional.pad(inputs.trajectory_S[:-1], (1, 0), value=-1)
    return inputs.trajectory_S == before_S


def broadcast_to_tokens(inputs: AdvantageInputs, advantages_NK: Tensor) -> Advantages:
    """The advantage of each trajectory, or of each of its turns, on every token that was sampled in it."""
    return Advantages(torch.where(inputs.mask_T, at_tokens(inputs, advantages_NK), 0).to(inputs.rewards_N.dtype))


def at_tokens(inputs: AdvantageInputs, values_NK: Tensor) -> Tensor:
    """The value of each token's trajectory, T, or of its turn where there is one for each."""
    if values_NK.dim() == 1:
        return values_NK[inputs.trajectory_T]
    if values_NK.shape[1] == 1 or inputs.turn_T is None:
        return values_NK[:, 0][inputs.trajectory_T]
    return values_NK[inputs.trajectory_T, inputs.turn_T]


def to_matrix(inputs: AdvantageInputs, values_T: Tensor) -> Tensor:
    """The sampled tokens of each sequence as a float64 row of S × L, zeros after its end."""
    counts_S = count_by_sequence(inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    matrix_SL = torch.zeros(len(counts_S), int(counts_S.max()) if len(counts_S) else 0, dtype=torch.float64)
    matrix_SL[_cells(inputs)] = values_T[inputs.mask_T].double()
    return matrix_SL


def to_tokens(inputs: AdvantageInputs, matrix_SL: Tensor) -> Tensor:
    """Back to T, zeros on tokens that were not sampled."""
    values_T = torch.zeros(len(inputs.mask_T), dtype=torch.float64)
    values_T[inputs.mask_T] = matrix_SL[_cells(inputs)]
    return values_T


def _cells(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    counts_S = count_by_sequence(inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    starts_S = counts_S.cumsum(0) - counts_S
    sequence = inputs.sequence_T[inputs.mask_T]
    return sequence, torch.arange(len(sequence)) - starts_S[sequence]


def rewards_matrix(inputs: AdvantageInputs, *, by_turn: bool = True) -> Tensor:
    """What each sampled token got, S × L: token rewards, and the trajectory's reward on the last one."""
    token_rewards_T = torch.zeros(len(inputs.mask_T)) if inputs.token_rewards_T is None else inputs.token_rewards_T
    rewards_SL = to_matrix(inputs, token_rewards_T)
    counts_S = count_by_sequence(inputs.mask_T, inputs.sequence_T, inputs.num_sequences)
    sampled = (counts_S > 0).nonzero().squeeze(1)
    rewards_SL[sampled, counts_S[sampled] - 1] += inputs.rewards_N.double()[inputs.trajectory_S[sampled]]
    if by_turn and inputs.turn_rewards_T is not None:
        turns_SL = to_matrix(inputs, inputs.turn_rewards_T)
        rewards_SL += turns_SL
        rewards_SL[sampled, counts_S[sampled] - 1] -= turns_SL.sum(1)[sampled]
    return rewards_SL


def discounted_sum(values_SL: Tensor, factor: float) -> Tensor:
    """Each value plus `factor` times the sum that starts after it."""
    sums_SL = values_SL.clone()
    for at in range(values_SL.shape[1] - 2, -1, -1):
        sums_SL[:, at] += factor * sums_SL[:, at + 1]
    return sums_SL


def rewards_to_go(inputs: AdvantageInputs, gamma: float, *, by_turn: bool = True) -> Tensor:
    """The discounted rewards from each sampled token on, T."""
    return to_tokens(inputs, discounted_sum(rewards_matrix(inputs, by_turn=by_turn), gamma))


REWARD = "reward"


def has_signal(scores: Sequence[Score], metric: str) -> bool:
    """Whether the survivors of a group differ in `metric`: the reward, or the part of it from the named function."""
    values = [_metric_value(score, metric) for score in scores]
    return len(values) > 1 and min(values) < max(values)


def _metric_value(score: Score, metric: str) -> float:
    if metric == REWARD:
        return score.value
    if metric not in score.parts and metric in SESSION_PARTS:
        return 0.0  # a session that was given nothing
    if metric not in score.parts:
        known = [REWARD, *score.parts]
        problem = f"no reward function is called {metric!r}; known: {', '.join(known)}"
        raise ConfigError([Mistake("algorithm.filter_groups.metric", problem, metric, fix=nearest(metric, known))])
    return score.parts[metric]


def has_seats(groups: Sequence[Group]) -> bool:
    """Whether any trajectory is an episode of several agents."""
    return any(trajectory.seats for group in groups for trajectory in group.survivors)


def split_seats(groups: Sequence[Group], weights: Mapping[str, float] = NOTHING) -> tuple[Group, ...]:
    """The groups with each episode of several agents split by seat; groups of one agent as they are.

    `weights` are those of the parts that a session brings with it, 1 unless given. Seats that an opponent played are
    left out, and so is a seat that no survivor played.
    """
    split: list[Group] = []
    for group in groups:
        if not has_seats([group]):
            split.append(group)
            continue
        numbers = sorted({seat for item in group.survivors for seat in item.policy_seats})
        failed = tuple(item for item in group.trajectories if not item.outcome.ok)
        for number in numbers:
            own = tuple(_seat(item, number, weights) for item in group.survivors if number in item.policy_seats)
            split.append(Group(group.task, own + failed))
            failed = ()  # each is counted once
    return tuple(split)


def split_trajectory(trajectory: Trajectory, weights: Mapping[str, float] = NOTHING) -> tuple[Trajectory, ...]:
    """A trajectory of several agents by the seats that the policy played; one of a single agent as it is."""
    if not trajectory.seats:
        return (trajectory,)
    return tuple(_seat(trajectory, number, weights) for number in sorted(trajectory.policy_seats))


def row_positions(trajectory: Trajectory) -> tuple[int, ...]:
    """Where the rows of a trajectory, or of one seat of it, stand among all rows of their episode."""
    return tuple(trajectory.extra.get("row_positions", range(len(trajectory.rows))))


def _seat(trajectory: Trajectory, number: int, weights: Mapping[str, float]) -> Trajectory:
    if trajectory.reward is None:
        raise MisuseError(f"trajectory {trajectory.uid}/{trajectory.sample} has no reward: name some functions")
    positions = [at for at, seat in enumerate(trajectory.seats) if seat == number]
    rows = tuple(trajectory.rows[at] for at in positions)
    extra = {name: value for name, value in trajectory.extra.items() if name != "seats"}
    return replace(
        trajectory,
        rows=rows,
        reward=_seat_score(trajectory.reward, rows, weights),
        extra={**extra, "row_positions": positions},
    )


def _seat_score(whole: Score, rows: Sequence[Row], weights: Mapping[str, float]) -> Score:
    """The score of an episode with what this seat was given in place of the mean over all seats."""
    turns = [turn for row in rows for turn in row.turns]
    given = {
        "environment": fsum(turn.reward or 0.0 for turn in turns),
        "tools": fsum(result.reward or 0.0 for turn in turns for result in turn.results),
    }
    own = {name: value for name, value in given.items() if name in whole.parts}
    change = fsum(weights.get(name, 1.0) * (value - whole.parts[name]) for name, value in own.items())
    return replace(whole, value=whole.value + change, parts={**whole.parts, **own})
