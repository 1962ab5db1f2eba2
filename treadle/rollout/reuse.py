"""Reuse of trajectories in a run directory: those that match are kept, those that only need a score are scored again.

Owns the rule and the refusal that names what changed. Reads the journal before a run writes to it, so that a refused
start leaves no trace. What counts is `provenance.py`.

    kept       all four digests match
    unscored   the tokens match; the reward functions, their settings or the row do not, or with rewards of scope group
               a sample of the task is missing
    refused    anything else: the directory holds an answer to another question
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

from treadle.config import Config
from treadle.config.section import Section
from treadle.errors import ConfigError, Mistake
from treadle.journal import Headline, Journal, JournalReader
from treadle.journal.schema import FILE_NAME
from treadle.rollout.provenance import Items, RunInputs, changes, digest_of
from treadle.types import Provenance, StopReason, Task

log = getLogger(__name__)

INPUTS = "inputs"
"""The event that says what a digest stands for: `part`, `digest` and `items`."""

TRAINING = "resume"
"""The event that every start of a training run writes."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run directory holds of what is asked for."""

    finished: Sequence[Headline] = ()
    unscored: frozenset[tuple[str, int]] = frozenset()


def record_inputs(journal: Journal, inputs: RunInputs, *, validation: bool) -> None:
    """Have the journal say what the digests of this start stand for."""
    for part, items in (("sampling", inputs.sampling(validation=validation)), ("scoring", inputs.scoring)):
        journal.add_event(INPUTS, part=part, digest=digest_of(items), items=dict(items))


def find_kept(run_dir: Path, config: Config, inputs: RunInputs, tasks: Sequence[Task], *, validation: bool) -> Kept:
    """What of a run directory is part of the result; a ConfigError where it is a result of something else."""
    if not (run_dir / FILE_NAME).exists():
        return Kept()
    n = config.rollout.val_kwargs.n if validation else config.rollout.n
    wanted = {task.uid: (task.n or n, inputs.stamp(task, validation=validation)) for task in tasks}
    with JournalReader.open(run_dir) as reader:
        if reader.events(kind=TRAINING, limit=1):
            problem = f"{run_dir} holds a training run: its samples are no evaluation"
            raise ConfigError([Mistake("logging.run_dir", problem, str(run_dir), fix="give another directory")])
        lines = [line for line in reader.headlines() if _is_wanted(line, wanted)]
        changed = [line for line in lines if not _same_tokens(line.provenance, wanted[line.uid][1])]
        if changed:
            raise ConfigError(_what_changed(reader, run_dir, config, inputs, changed, wanted, validation))
    finished = [line for line in lines if line.provenance == wanted[line.uid][1]]
    if config.reward.scores_groups():  # a score in a group is of that very group
        counts = Counter(line.uid for line in finished)
        finished = [line for line in finished if counts[line.uid] == wanted[line.uid][0]]
    done = {(line.uid, line.sample) for line in finished}
    unscored = frozenset((line.uid, line.sample) for line in lines) - done
    if unscored:
        why = "have another reward now, or were not scored" + (
            " as a whole group" if config.reward.scores_groups() else ""
        )
        log.warning("%d trajectories of %s %s: they are scored again", len(unscored), run_dir, why)
    return Kept(finished, unscored)


Wanted = Mapping[str, tuple[int, Provenance]]
"""By uid: how many samples, and what they would be made from."""


def _is_wanted(line: Headline, wanted: Wanted) -> bool:
    if line.uid not in wanted or line.sample >= wanted[line.uid][0]:
        return False
    if not line.is_intact:
        log.warning("%s/%d is not as it was written, and is sampled again", line.uid, line.sample)
        return False
    return line.outcome.ok and line.outcome.reason is not StopReason.ABORT


def _same_tokens(before: Provenance, now: Provenance) -> bool:
    return (before.sampling, before.prompt) == (now.sampling, now.prompt)


def _what_changed(
    reader: JournalReader,
    run_dir: Path,
    config: Config,
    inputs: RunInputs,
    changed: Sequence[Headline],
    wanted: Wanted,
    validation: bool,
) -> Iterator[Mistake]:
    """Every setting, file or source that differs, and then how to go on."""
    fix = f"--fresh sets {run_dir} aside and begins anew; logging.run_dir=DIRECTORY keeps both"
    asked, known = inputs.sampling(validation=validation), _known_inputs(reader)
    found = False
    for digest, count in Counter(line.provenance.sampling for line in changed).items():
        if digest == digest_of(asked):
            continue
        found = True
        if digest not in known:
            problem = f"{count} trajectories of {run_dir} say nothing about what they were made from"
            yield Mistake("logging.run_dir", problem, fix=fix)
            continue
        for name, before, now in changes(known[digest], asked):
            problem = (
                f"{now or 'absent'} now, but {count} trajectories of {run_dir} were sampled with {before or 'none'}"
            )
            yield Mistake(name, problem, origin=origin_of(config, name), fix=fix)
    prompts = [line.uid for line in changed if line.provenance.prompt != wanted[line.uid][1].prompt]
    if prompts and not found:
        files = "data.val_files" if validation else "data.train_files"
        uids = list(dict.fromkeys(prompts))
        problem = f"{len(uids)} tasks have another prompt than when {run_dir} was written, such as {uids[0]}"
        yield Mistake(files, problem, fix=fix)


def _known_inputs(reader: JournalReader) -> dict[str, Items]:
    events = reader.events(kind=INPUTS, limit=1 << 30)
    return {event.fields["digest"]: event.fields["items"] for event in events if event.is_intact}


def origin_of(config: Config, name: str) -> object:
    """Where the value of a dotted key came from, where it is a key."""
    section: object = config
    *path, last = name.split(".")
    for part in path:
        section = getattr(section, part, None) if isinstance(section, Section) else None
    return section.origin(last) if isinstance(section, Section) and last in section.values() else None
