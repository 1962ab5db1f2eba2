"""SFT data: conversations of data files and trajectories of run directories, as rows with a mask over what is learned.

    file       messages → ids by the renderer that sessions use: prompt, each assistant's turn up to its stop token
               (mask 1), and what stands between two turns (mask 0). A turn of `weight` 0 is read and not learned
    journal    rows as they were recorded, with the ids and the mask of their sampled tokens; nothing is rendered again

Owns what becomes a row, which rows are too long, and what is said of all of them. Rows are held in memory, as tasks
are. Refuses a run whose tokenizer gives other ids.
Invariant: a row trains the tokens that a session of the same conversation would have sampled, and no others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import nan
from pathlib import Path
from typing import Any

from treadle.algorithm.advantage_inputs import row_positions, split_trajectory
from treadle.config import Config, SFTRunConfig, TrainConfig
from treadle.config.load import load
from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.config.training import AlgorithmConfig
from treadle.data.file_formats import TaskRow, label_source, read_records
from treadle.data.generators import REASONING_GYM_PREFIX, generate_rows, is_function
from treadle.data.renderer import Renderer
from treadle.data.task_files import ChatExample, to_conversation
from treadle.data.task_source import TaskSource, share_draws
from treadle.data.tasks import MAX_MISTAKES
from treadle.errors import ConfigError, Failure, Mistake
from treadle.journal import JournalReader, TrajectoryEntry
from treadle.journal.schema import FILE_NAME
from treadle.model.tokenizer import Vocabulary, find_model_path
from treadle.rollout.tools import Toolbox
from treadle.types import Row, StopReason, Task

Schemas = Sequence[Mapping[str, Any]]

_OF_VALIDATION = re.compile(r"(validation-\d+|greedy)/")
"""Beginning of uids whose trajectories a training run did not train on: a run's validation stays unseen."""


@dataclass(frozen=True, slots=True)
class SFTRows:
    """The rows of one file list, in the order in which they train."""

    source: TaskSource
    rows: Mapping[str, Row]
    """By the uid of the source's tasks."""
    dropped: int = 0
    """Longer than `sft.max_length`, with `sft.overlong: drop`."""
    below_reward: int = 0
    """Trajectories of run directories, or seats of them, whose reward is less than `sft.min_reward`."""

    def take(self, count: int) -> tuple[Row, ...]:
        """The next rows, epoch after epoch."""
        return tuple(self.row(task) for task in self.source.take(count))

    def row(self, task: Task) -> Row:
        """The row of a task; one that `data.train_weights` draws again in an epoch is the same row."""
        return self.rows[task.uid if task.uid in self.rows else task.uid.rpartition("+")[0]]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.prompt_ids) + len(row.ids) for row in self.rows.values())

    @property
    def num_trained(self) -> int:
        """Tokens that have a loss."""
        return sum(row.num_sampled for row in self.rows.values())

    @property
    def longest(self) -> int:
        return max(len(row.prompt_ids) + len(row.ids) for row in self.rows.values())

    def describe(self) -> str:
        """What there is to learn from, in a sentence."""
        left_out = [f"{self.dropped:,} longer ones are dropped"] if self.dropped else []
        left_out += [f"{self.below_reward:,} trajectories are below sft.min_reward"] if self.below_reward else []
        return "; ".join(
            [
                f"{len(self.rows):,} rows of {self.num_tokens:,} tokens, {self.num_trained:,} of them learned; the "
                f"longest has {self.longest:,}",
                *left_out,
            ]
        )


async def load_sft_rows(config: SFTRunConfig, renderer: Renderer, *, validation: bool = False) -> SFTRows:
    """The rows of `data.train_files`, or of `data.val_files`; every mistake in one report."""
    data = config.data
    async with await Toolbox.create(config.rollout.multi_turn) as toolbox:
        reader = _RowReader(config, renderer, toolbox, "data.val_files" if validation else "data.train_files")
        reader.read(data.val_files if validation else data.train_files, _limit(config, validation))
    if reader.mistakes:
        raise ConfigError(reader.mistakes)
    tasks = [Task(uid, (), extra={"row": _digest(row)}) for uid, row in reader.rows.items()]
    shares = [] if validation else share_draws(data.train_files, reader.counts, data.train_weights)
    shuffle = data.shuffle and not validation
    source = TaskSource(tasks, shuffle=shuffle, seed=data.seed, key=reader.key, shares=shares)
    return SFTRows(source, reader.rows, reader.dropped, reader.below_reward)


def _limit(config: SFTRunConfig, validation: bool) -> int:
    return config.data.val_max_samples if validation else config.data.train_max_samples


def _digest(row: Row) -> str:
    return blake2b(repr((row.prompt_ids, row.ids, row.mask)).encode(), digest_size=12).hexdigest()


def lay_out(conversation: ChatExample, renderer: Renderer, schemas: Schemas) -> Row:
    """The row of a conversation, as a session that says it would have it."""
    messages = conversation.messages
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    ids: list[int] = []
    mask: list[int] = []
    for number, at in enumerate(turns):
        last = number + 1 == len(turns)
        following = () if last else messages[at + 1 : turns[number + 1]]
        said = renderer.turn(messages[: at + 1], schemas, following)
        ids += said
        mask += [int(messages[at].get("weight") != 0)] * len(said)
        if not last:
            between = renderer.observation(following, schemas)
            ids += between
            mask += [0] * len(between)
    return training_row(renderer.prompt(messages[: turns[0]], schemas), ids, mask)


def training_row(prompt_ids: Sequence[int], ids: Sequence[int], mask: Sequence[int]) -> Row:
    """A row that no engine has sampled: it has no logprobs and no versions."""
    length = len(ids)
    return Row(tuple(prompt_ids), tuple(ids), tuple(mask), (nan,) * length, (-1,) * length)


class _RowReader:
    """Collects rows, and the mistakes in them."""

    def __init__(self, config: SFTRunConfig, renderer: Renderer, toolbox: Toolbox, key: str) -> None:
        self._config = config
        self._renderer = renderer
        self._toolbox = toolbox
        self.key = key
        self.rows: dict[str, Row] = {}
        self.counts: list[int] = []
        self.mistakes: list[Mistake] = []
        self.dropped = 0
        self.below_reward = 0
        self._overlong: list[tuple[int, str]] = []

    def read(self, files: Sequence[str], limit: int) -> None:
        for file in files:
            before = len(self.rows)
            try:
                for uid, row in self._rows_of(file):
                    self._add(uid, row)
                    if len(self.rows) == limit or len(self.mistakes) >= MAX_MISTAKES:
                        break
            except ConfigError as error:
                self.mistakes += error.mistakes
            self.counts.append(len(self.rows) - before)
            if not self.mistakes and not self._overlong and before == len(self.rows) != limit:
                self.mistakes.append(Mistake(self.key, self._explain_nothing(), file))
        self._report_overlong()

    def _explain_nothing(self) -> str:
        if self.below_reward:
            return f"no trajectory has a reward of sft.min_reward {self._config.sft.min_reward:g} or more"
        return "it holds no row that trains" + (", beside those that are too long" if self.dropped else "")

    def _add(self, uid: str, row: Row) -> None:
        length = len(row.prompt_ids) + len(row.ids)
        if uid in self.rows:
            fix = "a uid names one conversation; leave it out to have one made from file and line"
            self.mistakes.append(Mistake(self.key, f"uid {uid!r} is there twice", uid, fix=fix))
        elif length > self._config.longest_row():
            if self._config.sft.overlong == "drop":
                self.dropped += 1
            else:
                self._overlong.append((length, uid))
        elif row.num_sampled:
            self.rows[uid] = row

    def _report_overlong(self) -> None:
        if not self._overlong:
            return
        (longest, uid), count = max(self._overlong), len(self._overlong)
        named = "sft.max_length" if self._config.sft.max_length else "actor.ppo_max_token_len_per_gpu"
        limit = self._config.longest_row()
        problem = (
            f"{count} of {count + len(self.rows)} conversations have more than {limit} tokens: {uid} has {longest}"
        )
        fix = f"raise it to {longest}, or set sft.overlong=drop"
        self.mistakes.append(Mistake(named, problem, limit, self._config.origin(named), fix))

    def _rows_of(self, file: str) -> Iterator[tuple[str, Row]]:
        if file.startswith(REASONING_GYM_PREFIX):
            fix = "give files or functions with conversations, or the run directory of a rollout over these tasks"
            raise ConfigError([Mistake(self.key, "these are tasks, which have no answers to learn", file, fix=fix)])
        if (Path(file).expanduser() / FILE_NAME).is_file():
            yield from self._read_run(Path(file).expanduser())
            return
        for record in self._records_of(file):
            try:
                conversation = to_conversation(record, self._config.data, self._config.sft)
                yield conversation.uid, lay_out(conversation, self._renderer, self._schemas(conversation))
            except ConfigError as error:
                self.mistakes += error.mistakes
            except Failure as failure:
                self.mistakes.append(Mistake(record.place, f"cannot be rendered: {failure}"))
            if len(self.mistakes) >= MAX_MISTAKES:
                self.mistakes.append(Mistake(self.key, f"gave up reading after {MAX_MISTAKES} mistakes"))
                return

    def _records_of(self, file: str) -> Iterator[TaskRow]:
        if not is_function(file):
            yield from read_records(file, label_source(file), self.key)
            return
        for index, row in enumerate(generate_rows(file, self._config.data, self.key)):
            place, uid = f"{file}[{index}]", f"{file.rpartition(':')[2]}:{index}"
            is_row = isinstance(row, Mapping)
            problem = None if is_row else f"a row must be a map with named fields; it is {type(row).__name__}"
            yield TaskRow(place, uid, row if is_row else {}, problem)

    def _schemas(self, conversation: ChatExample) -> Schemas:
        tools = conversation.tools
        if tools and isinstance(tools[0], Mapping):
            return tools
        return self._toolbox.schemas(tools)  # type: ignore[arg-type]

    def _read_run(self, run_dir: Path) -> Iterator[tuple[str, Row]]:
        """The trajectories of a run that ended well and were rewarded enough, row by row."""
        least = self._config.sft.min_reward
        if least is None:
            problem = f"is needed for the trajectories of {run_dir}: which of them are worth learning?"
            raise ConfigError([Mistake("sft.min_reward", problem, fix="set it, as sft.min_reward=1")])
        weights = check_vocabulary(run_dir, self._config.model, self.key).reward.session_weights()
        with JournalReader.open(run_dir) as reader:
            for entry in reader.trajectories():
                found, headline = entry.trajectory, entry.headline
                if _OF_VALIDATION.match(headline.uid) or not _ended_well(found.outcome.ok, found.outcome.reason):
                    continue
                if not headline.is_intact or not found.rows:
                    self._refuse_lost(entry, run_dir, least)
                    continue
                for seat in split_trajectory(found, weights):
                    if seat.reward is None or seat.reward.value < least:
                        self.below_reward += 1
                        continue
                    for number, row in zip(row_positions(seat), seat.rows, strict=True):
                        name = f"{run_dir.name}/{headline.uid}/{headline.sample}"
                        yield f"{name}.{number}" if number else name, training_row(row.prompt_ids, row.ids, row.mask)

    def _refuse_lost(self, entry: TrajectoryEntry, run_dir: Path, least: float) -> None:
        """ConfigError where the tokens of a trajectory that is worth learning are gone."""
        headline = entry.headline
        if headline.reward is None or headline.reward.value < least:
            self.below_reward += 1
            return
        why = "was dropped for logging.journal_max_mb" if headline.is_intact else "is damaged"
        problem = f"the record of {run_dir.name}/{headline.uid}/{headline.sample} {why}: its tokens are gone"
        fix = "run the rollout again, or raise sft.min_reward beyond its reward"
        raise ConfigError([Mistake(self.key, problem, str(run_dir), fix=fix)])


def _ended_well(ok: bool, reason: StopReason) -> bool:
    return ok and reason is not StopReason.ABORT


def check_vocabulary(run_dir: Path, model: ModelConfig, key: str) -> Config:
    """The config of a run; refused where another tokenizer made its ids."""
    recorded = load(run_dir / "config.yaml")
    theirs = recorded.model
    path = theirs.tokenizer_path or theirs.path
    if find_model_path(path) is None:
        if not isinstance(recorded, TrainConfig) or find_model_path(str(run_dir)) in (None, run_dir):
            problem = f"its model {path!r} is not here, so it is unknown whose token ids it recorded"
            raise ConfigError([Mistake(key, problem, str(run_dir), fix="bring the model back to that path")])
        theirs = ModelConfig(**{**theirs.values(), "path": str(run_dir), "tokenizer_path": None})
    if (difference := Vocabulary.of(model).difference(Vocabulary.of(theirs))) is not None:
        problem = f"its token ids are those of another tokenizer than model.path has: {difference}"
        raise ConfigError([Mistake(key, problem, str(run_dir), fix="train a model with the same tokenizer")])
    return recorded


def with_step_settings(config: SFTRunConfig, longest: int) -> SFTRunConfig:
    """The config that the networks of SFT are built from: one update of cross entropy for each batch, at temperature 1.

    Conversations were not sampled, so keys that are about sampling do not count. `longest`: tokens of the longest row.
    """
    batch = config.data.train_batch_size
    loss = {**config.actor.policy_loss.values(), "loss_mode": "treadle.algorithm.policy_losses:cross_entropy"}
    changed = {
        "policy_loss": type(config.actor.policy_loss)(**loss),
        "ppo_mini_batch_size": batch,
        "ppo_epochs": 1,
        "shuffle": False,
        "use_kl_loss": False,
        "entropy_coeff": 0.0,
    }
    actor = type(config.actor)(**{**config.actor.values(), **changed})
    limits = config.rollout.limits
    rollout = RolloutConfig(
        prompt_length=1, response_length=max(1, longest - 1), max_model_len=max(2, longest), limits=limits
    )
    return SFTRunConfig(**{**config.values(), "actor": actor, "rollout": rollout, "algorithm": AlgorithmConfig()})
