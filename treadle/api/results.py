"""Results: what a run or an evaluation came to, read from its run directory whenever it is asked for.

`Run(directory)` opens any training run, also one that the command started or that is still going on. Changes nothing.
Paths are absolute, so that a script may go to another directory; what is printed is relative where it can be.
"""

import os
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.parser import run_path
from treadle.config import TrainConfig
from treadle.errors import ConfigError, Mistake, MisuseError, RunError
from treadle.inspect.run_records import Curve, Order, RunRecords
from treadle.inspect.transcript import describe_trajectory
from treadle.terminal import say
from treadle.types import Trajectory

if TYPE_CHECKING:
    from treadle.observe import Summary

_WIDTH = 110
_CURVES = (
    ("reward/mean", "reward"),
    ("validation/success", "success"),
    ("sft/loss", "loss"),
    ("validation/loss", "val loss"),
)


class Run:
    """A training run. `treadle.train` returns one; `Run(directory)` opens an earlier one.

    >>> import treadle
    >>> treadle.Run("runs/nothing")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    treadle.errors.ConfigError: runs/nothing: there is no such directory
    ...
    """

    def __init__(self, run_dir: "str | os.PathLike[str]", *, checkpoint: str = "latest") -> None:
        """`run_dir` may be `latest`, the newest run below `runs/`. `checkpoint` chooses what `model_dir` and
        `adapter_dir` are of: `latest`, `best`, a step, or the name of a checkpoint."""
        given = run_path(os.fspath(run_dir))
        RunRecords(given)  # a mistake names the directory as it was given
        self.run_dir = given.absolute()
        self._checkpoint = str(checkpoint)
        self._records = RunRecords(self.run_dir)

    @property
    def steps(self) -> int:
        """Training steps done."""
        return max(self._records.steps(), default=0)

    @property
    def success(self) -> float | None:
        """Share of answers that reach `reward.success_threshold`: in the newest validation, or without one in the
        newest training step. None where there is neither, or no reward."""
        validated = self.metrics.get("validation/success")
        if validated:
            return validated[-1][1]
        rewards = [item.reward for item in self._records.find() if item.reward is not None]
        enough = self._records.config.reward.success_threshold
        return sum(reward >= enough for reward in rewards) / len(rewards) if rewards else None

    @property
    def metrics(self) -> dict[str, Curve]:
        """Every metric by name, as (step, value) in the order of the steps."""
        return self._records.metrics()

    @property
    def model_dir(self) -> Path:
        """The checkpoint, the newest unless another was chosen: a Hugging Face directory, for `from_pretrained`, vLLM
        or `treadle.rollout(model=…)`.

        Of a run that trained adapters (LoRA), the merged model, which the first call writes to `RUN/merged`.
        """
        from treadle.inspect.export import find_model

        return find_model(self.run_dir, self._find_checkpoint())

    @property
    def adapter_dir(self) -> Path:
        """The checkpoint of a run that trained adapters (LoRA): a PEFT directory, for peft or `model.adapter`."""
        config = self._records.config
        if not isinstance(config, TrainConfig) or config.actor.lora.r is None:
            raise MisuseError(f"{self.run_dir} has no adapter: all parameters were trained. See run.model_dir")
        return self._find_checkpoint()

    def _find_checkpoint(self) -> Path:
        from treadle.checkpoint.store import latest
        from treadle.inspect.export import find_checkpoint

        if self._checkpoint != "latest":
            return find_checkpoint(self.run_dir, self._checkpoint, "checkpoint")
        found = latest(self.run_dir)
        if found is None:
            raise RunError(f"{self.run_dir} has no whole checkpoint: training has not got so far")
        return found

    def trajectories(self, step: int | None = None, *, validation: bool = False) -> list[Trajectory]:
        """What a training step was trained on, the newest unless `step` is given; or the validation after it."""
        known = self._records.validations() if validation else self._records.steps()
        if step is not None and step not in known:
            what = "validation after it" if validation else "training step"
            shown = ", ".join(map(str, known[-8:])) or "none"
            raise ConfigError([Mistake("step", f"{step}: there is no such {what}", step, fix=f"the last are {shown}")])
        return [item.trajectory for item in self._records.select(step, validation=validation)]

    @property
    def config_yaml(self) -> str:
        """The YAML that the call amounts to; `treadle train` repeats the run from it."""
        names = ("train.yaml", "sft.yaml", "config.yaml")
        found = next((self.run_dir / name for name in names if (self.run_dir / name).is_file()), None)
        return (found or self.run_dir / "config.yaml").read_text(encoding="utf-8")

    def show(self, step: int | None = None, *, validation: bool = False, count: int = 1) -> None:
        """Print how the run went, and the `count` worst and best trajectories of a step or of the validation after it.

        `treadle show` prints more of them.
        """
        say(str(self))
        _show_extremes(self._records, count, step, validation)

    def __repr__(self) -> str:
        success = self.success
        solved = "" if success is None else f", success {success:.3f}"
        return f"Run({_shown(self.run_dir)!r}: {self.steps} steps{solved})"

    def __str__(self) -> str:
        """The run in a few lines: reward and success as curves, and where everything is."""
        from treadle.observe.training_progress import draw_curve

        lines = [repr(self)]
        for name, shown in _CURVES:
            values = [value for _, value in self.metrics.get(name, ())]
            if len(values) > 1:
                lines.append(f"{shown:8} {draw_curve(values)} {values[0]:.3f} → {values[-1]:.3f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return _preformatted(str(self))


class Evaluation:
    """What a rollout came to. `treadle.rollout` returns one; printed, it is a table by data source.

    >>> import treadle
    >>> sums = [{"prompt": "1+2=", "answer": "3", "data_source": "small"}]
    >>> found = treadle.rollout(model="treadle/tiny-calculator", tasks=sums, reward="number_match",
    ...                         rollout={"n": 4, "response_length": 16}, logging={"logger": []})
    >>> list(found.by_source), found.summary.num_trajectories
    (['small'], 4)
    >>> found.trajectories()[0].data_source
    'small'
    """

    def __init__(self, run_dir: Path, summary: "Summary") -> None:
        self.run_dir = run_dir.absolute()
        self.summary = summary
        """Rewards, pass@k, stop reasons, failures and timings, as records."""

    @property
    def success(self) -> float | None:
        """Share of answers that reach `reward.success_threshold`, each task counting the same; None without scores."""
        found = [item for source in self.summary.sources for item in source.pass_at_k if item.k == 1]
        groups = sum(item.num_groups for item in found)
        return sum(item.value * item.num_groups for item in found) / groups if groups else None

    @property
    def by_source(self) -> dict[str, float]:
        """Share of such answers for each data source that has scores."""
        return {
            source.data_source: item.value
            for source in self.summary.sources
            for item in source.pass_at_k
            if item.k == 1
        }

    @property
    def table(self) -> str:
        """Rewards and pass@k by data source, how trajectories ended, and timings, as text."""
        from rich.console import Console

        from treadle.observe.rich_output import render_summary

        text = StringIO()
        console = Console(
            file=text, width=_WIDTH, markup=False, emoji=False, highlight=False, force_jupyter=False, no_color=True
        )
        console.print(render_summary(self.summary))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def trajectories(self) -> list[Trajectory]:
        """All of them, as they ended."""
        return [item.trajectory for item in RunRecords(self.run_dir).select()]

    def show(self, count: int = 1) -> None:
        """Print the table, and the `count` worst and best trajectories."""
        say(self.table)
        _show_extremes(RunRecords(self.run_dir), count)

    def __repr__(self) -> str:
        success = self.success
        solved = "" if success is None else f", success {success:.3f}"
        failed = f", {self.summary.num_failed} failed" if self.summary.num_failed else ""
        return f"Evaluation({_shown(self.run_dir)!r}: {self.summary.num_trajectories} trajectories{solved}{failed})"

    def __str__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        return _preformatted(self.table)


def _show_extremes(records: RunRecords, count: int, step: int | None = None, validation: bool = False) -> None:
    """Print the worst trajectories, then those of the best that are not among them."""
    shown = set[tuple[str, int, int]]()
    orders: tuple[Order, ...] = ("worst", "best")
    for order in orders:
        chosen = records.select(step, validation=validation, order=order, limit=count)
        for recorded in chosen if order == "worst" else reversed(chosen):
            headline = recorded.headline
            name = (headline.uid, headline.sample, headline.attempt)
            if name not in shown:
                say(f"\n{order}: {describe_trajectory(recorded)}")
            shown.add(name)


def _shown(path: Path) -> str:
    """A directory as a person in the working directory would type it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
