"""The `logging` section: the run directory, the journal and the trackers."""

from typing import Literal

from treadle.config.section import Section, key

Tracker = Literal["console", "tensorboard", "wandb", "mlflow", "trackio"]


class LoggingConfig(Section):
    """Where a run leaves its traces. Metrics are always written as JSONL too."""

    project_name: str = key("treadle", "project, for trackers and the default run directory")
    experiment_name: str = key(
        "run", "experiment, for trackers and the default run directory; the name of the config file or recipe if unset"
    )
    run_dir: str | None = key(
        None,
        "directory that holds everything about the run; null for runs/project/experiment, with -rollout or -validation "
        "after it for treadle rollout",
    )
    logger: tuple[Tracker, ...] = key(
        ("console",), "where metrics go; without console, training shows no steps on the terminal, and logs them alone"
    )
    journal: bool = key(True, "keep every trajectory in the run directory")
    journal_max_mb: int = key(
        4096, "size of the journal; the oldest tokens and messages are dropped for it, then the oldest records", ge=1
    )
    prometheus_port: int | None = key(
        None,
        "port of this machine at which a Prometheus scraper finds the newest metrics; null for none",
        ge=1,
        le=65535,
    )
    log_val_generations: int = key(0, "validation transcripts to send to the trackers", ge=0)

    def directory(self, purpose: Literal["train", "rollout", "validation"] = "train") -> str:
        """The run directory: by default one for each purpose, so that a run's samples never become an evaluation."""
        suffix = "" if purpose == "train" else f"-{purpose}"
        return self.run_dir or f"runs/{self.project_name}/{self.experiment_name}{suffix}"
