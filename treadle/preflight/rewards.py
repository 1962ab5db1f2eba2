"""Preflight of rewards: functions load, rows hold what they take, and the first task's ground truth scores.

Owns which columns of the rows a function takes and lacks, and the scores that are tried before a run: those of the
ground truth and of an empty answer. Functions are imported where they will run, in a worker process as they will be.
Invariant: a function that takes the ground truth without a default is never called for a row that has none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from treadle.config import Config, RewardConfig
from treadle.data.renderer import Renderer
from treadle.errors import ConfigError, Failure, Mistake, RunError, nearest
from treadle.preflight.report import PreflightReport
from treadle.reward.arguments import GROUND_TRUTH, PARAMETERS, is_filled, parameter_of, read_columns
from treadle.reward.builtin import BUILTINS
from treadle.reward.context import RewardContext
from treadle.reward.result import Fault, ScoreFailure
from treadle.reward.reward_models import prepare_models
from treadle.reward.scorer import Scorer
from treadle.reward.unsafe_calls import find_fenced, find_unsafe_calls
from treadle.types import Outcome, Score, StopReason, Task, Trajectory

STOOD_IN = frozenset({"trajectory", "trajectories", "messages"})
"""What reward functions take that is not whole before a model has answered: one assistant message stands in for it."""

PASSING_FAULTS = (Fault.TIMEOUT, Fault.CPU_TIME, Fault.MEMORY, Fault.CRASH)
"""Failures of a reward function that another attempt, or a machine with less to do, may not have."""

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "final_answer", "expected_answer", "label", "gold")
"""What data sets call the ground truth, the usual ones first."""

USUAL_FORMS = "<answer>{0}</answer>\n\\boxed{{{0}}}\n#### {0}\nAnswer: {0}"
"""An answer in the forms that reward functions usually ask for."""

TaskSets = Mapping[str, Sequence[Task]]
"""Tasks by where they are from: a file, or the key of several."""


async def check_rewards(config: Config, tasks: TaskSets, report: PreflightReport) -> None:
    """Functions load, every row has the columns that they take, and the first task's answers are scored."""
    reward = config.reward
    if not reward.functions:
        return
    report.warnings += find_unsafe_calls(reward)
    for line in find_fenced(reward):
        report.note("reward sandbox", line)
    workers = min(reward.num_workers, 1)
    functions = RewardConfig(**{**reward.values(), "classifiers": {}, "judges": {}, "num_workers": workers})
    first = next((task for found in tasks.values() for task in found), None)
    try:
        async with await Scorer.create(functions) as scorer:
            report.add(_find_absent_columns(config, scorer, tasks))
            if first is not None and any(
                _lacks(name, first) for needs in scorer.needs.values() for name in needs.required
            ):
                report.skip("scores of the first task", f"{first.uid} has not all that the functions take")
            elif first is not None:
                _note_columns(scorer, first, report)
                await _score_answers(scorer, first, report)
    except (ConfigError, RunError) as error:
        report.add(error.mistakes if isinstance(error, ConfigError) else [Mistake("reward.functions", str(error))])
        if first is not None:
            report.skip("scores of the first task", "a reward function could not be loaded")


async def check_reward_models(
    config: Config, renderer: Renderer | None, environment: Mapping[str, str], report: PreflightReport
) -> None:
    """Prompts, patterns and tokenizers of judges and classifiers; their weights are not loaded."""
    reward, judges = config.reward, dict(config.reward.judges)
    if renderer is None and (borrowing := [name for name, judge in judges.items() if judge.path is None]):
        report.skip(f"judges {', '.join(borrowing)}", "they use the model's tokenizer, which could not be loaded")
        judges = {name: judge for name, judge in judges.items() if judge.path is not None}
    if judges or reward.classifiers:
        alone = RewardConfig(**{**reward.values(), "judges": judges})
        context = RewardContext(config.model, renderer, api_keys=environment)
        prepared = await prepare_models(alone, context)
        await prepared.close()
        report.add(prepared.mistakes)


def _lacks(name: str, task: Task) -> bool:
    """Whether a row has nothing for a parameter that has no default."""
    return task.ground_truth is None if parameter_of(name, task) in GROUND_TRUTH else not is_filled(name, task)


def _find_absent_columns(config: Config, scorer: Scorer, tasks: TaskSets) -> Iterator[Mistake]:
    """A mistake for each column that functions take and rows do not have."""
    takers: dict[str, list[str]] = {}
    for function, needs in scorer.needs.items():
        for name in needs.required:
            column = config.data.answer_key if name in GROUND_TRUTH else name
            takers.setdefault(column, []).append(function)
    for place, found in tasks.items():
        for column, functions in takers.items():
            is_answer = column == config.data.answer_key
            lacking = [task for task in found if _lacks("answer" if is_answer else column, task)]
            if lacking:
                yield _describe_absent(config, place, column, functions, lacking, len(found))


def _describe_absent(
    config: Config, place: str, column: str, functions: Sequence[str], lacking: Sequence[Task], count: int
) -> Mistake:
    columns = list(read_columns(lacking[0]))
    listed = ", ".join(columns) or "none at all"
    if len(lacking) == count:
        problem = f"rows have no {column!r}; they have {listed}"
    else:
        problem = f"{len(lacking):,} of {count:,} rows have no {column!r}, such as {lacking[0].uid}; it has {listed}"
    named = ", ".join(map(repr, functions))
    problem += (
        f"; reward function{'s' if len(functions) > 1 else ''} {named} take{'' if len(functions) > 1 else 's'} it"
    )
    if column == config.data.answer_key:
        fix, problem = _find_answer(columns, everywhere=len(lacking) == count), f"{problem} as the ground truth"
    elif found := nearest(column, [*columns, *PARAMETERS["sample"]]):
        return Mistake(place, problem, fix=found)
    else:
        fix = f"take a column that is there, or one of {', '.join(PARAMETERS['sample'])}"
    if any(_is_own(config, name) for name in functions):
        fix += f"; or give the parameter a default where rows may do without, such as {column}=None"
    return Mistake(place, problem, fix=fix)


def _is_own(config: Config, function: str) -> bool:
    return config.reward.functions[function].path not in BUILTINS


def _find_answer(columns: Iterable[str], *, everywhere: bool) -> str:
    guess = next((name for name in ANSWER_COLUMNS if name in columns), None)
    if not everywhere:
        return "give every row one"
    return f"set data.answer_key: {guess}" if guess else "set data.answer_key to the column that holds it"


def _note_columns(scorer: Scorer, task: Task, report: PreflightReport) -> None:
    """What functions take from columns of the row, by name: also in place of a default."""
    for function, needs in scorer.needs.items():
        columns = [name for name in needs.filled if name in task.extra and parameter_of(name, task) == name]
        columns = [name for name in columns if name not in PARAMETERS["sample"] and name not in PARAMETERS["group"]]
        if columns:
            report.note("rewards", f"{function} takes columns of the row: {', '.join(columns)}")


async def _score_answers(scorer: Scorer, task: Task, report: PreflightReport) -> None:
    """The first task's scores, of its ground truth where it has one and of an empty answer."""
    answers = {"an empty answer": ""}
    if task.ground_truth is None:
        report.skip("the score of the ground truth", f"{task.uid} has none")
    else:
        answers = {"its ground truth": _as_answer(task.ground_truth), **answers}
    group: list[Trajectory] = []
    for words, answer in answers.items():
        try:
            trajectory = await _scored(scorer, task, answer)
            group.append(replace(trajectory, sample=len(group)))
            report.note("rewards", f"{task.uid} with {words}: {_describe(trajectory.reward)}")
        except Failure as failure:
            _report_unscored(scorer, f"{task.uid} with {words} cannot be scored", failure, report)
    if scorer.scores_groups and group:
        await _check_group_rewards(scorer, task, group, report)
    elif len(group) == 2:
        await _compare(scorer, task, group, report)


def _as_answer(ground_truth: object) -> str:
    """A ground truth as a model may say it: the first of several."""
    is_many = isinstance(ground_truth, list | tuple) and len(ground_truth) > 0
    return str(ground_truth[0] if is_many else ground_truth)  # type: ignore[index]


async def _compare(scorer: Scorer, task: Task, group: Sequence[Trajectory], report: PreflightReport) -> None:
    """A warning where a right answer and none score the same under every function, in whatever form it is given."""
    right, empty = (item.reward for item in group)
    if right is None or empty is None or right.parts != empty.parts or not _reads_answers(scorer, task):
        return
    with suppress(Failure):
        trajectory = await _scored(scorer, task, USUAL_FORMS.format(_as_answer(task.ground_truth)))
        if trajectory.reward is not None and trajectory.reward.parts != empty.parts:
            forms = "<answer>, \\boxed, #### and `Answer:`"
            report.note("rewards", f"{task.uid} with it in {forms}: {_describe(trajectory.reward)}")
            return
    report.warnings.append(
        f"{task.uid}: the ground truth and an empty answer score alike under every reward function: "
        f"{_describe(right)}; nothing is learned from that, unless they ask for a form that the ground truth lacks"
    )


def _reads_answers(scorer: Scorer, task: Task) -> bool:
    """Whether a ground truth could be an answer: no map, no tests that a program is to pass, no whole trajectory."""
    taken = {name for needs in scorer.needs.values() for name in needs.filled}
    is_text = isinstance(task.ground_truth, str | int | float | list | tuple)
    return is_text and not taken & STOOD_IN and not scorer.runs_programs


async def _scored(scorer: Scorer, task: Task, answer: str) -> Trajectory:
    """An answer as a trajectory, with its score; a Failure where it has none."""
    messages = (*task.messages, {"role": "assistant", "content": answer})
    outcome = Outcome.ended(StopReason.STOP)
    trajectory = Trajectory(task.uid, 0, (), outcome, messages=messages, data_source=task.data_source)
    return replace(trajectory, reward=await scorer.score(task, trajectory))


async def _check_group_rewards(scorer: Scorer, task: Task, group: list[Trajectory], report: PreflightReport) -> None:
    """What has scope group, on the same answers as if they were the samples of the task."""
    try:
        given = "; ".join(map(_describe, await scorer.score_group(task, group)))
        report.note("rewards", f"{task.uid} with these {len(group)} answers as a group: {given}")
    except Failure as failure:
        _report_unscored(scorer, f"{task.uid} cannot be scored as a group", failure, report)


def _report_unscored(scorer: Scorer, what: str, failure: Failure, report: PreflightReport) -> None:
    """A mistake where the run would fail the same way; a warning where a trajectory with tokens may fare better."""
    function = failure.function if isinstance(failure, ScoreFailure) else ""
    key = f"reward.functions.{function}" if function else "reward.functions"
    passing = isinstance(failure, ScoreFailure) and failure.fault in PASSING_FAULTS
    taken = {name for needs in scorer.needs.values() for name in needs.filled}
    if stood_in := sorted(taken & STOOD_IN):
        why = f"it takes {', '.join(stood_in)}, which has no sampled tokens and no turns before the run"
        report.warnings.append(f"{key}: {what}: {failure}; {why}")
    elif passing:
        report.warnings.append(f"{key}: {what}: {failure}")
    else:
        report.add([Mistake(key, f"{what}: {failure}", fix="return a number for whatever a model may answer")])


def _describe(score: Score | None) -> str:
    if score is None:
        return "no score"
    return f"{score.value:g} ({', '.join(f'{name} {value:g}' for name, value in score.parts.items())})"
