"""Journal: tasks, trajectories, events and metrics of a run, crash-safe and readable while it runs.

run_dir/
  config.yaml      resolved config, with origins; config.1.yaml … of earlier starts where it differed
  run.json         every start: command, versions, host, status, and the cause where it did not finish
  journal.sqlite   everything else; see `schema`
  metrics.jsonl    the metrics once more, for other tools
  run.log          log messages of the run
  lock             the process that holds the directory
"""

from treadle.journal.fresh_start import fresh_start
from treadle.journal.journal import Journal
from treadle.journal.reader import DamagedRecord, JournalReader
from treadle.journal.records import (
    AnnotatedRow,
    Counts,
    Event,
    Filter,
    Headline,
    Metrics,
    PartEntry,
    RowAnnotation,
    RunStatus,
    SessionTime,
    TrajectoryEntry,
)
from treadle.journal.run_directory import RunStart, logging_to, read_starts

__all__ = [
    "AnnotatedRow",
    "Counts",
    "DamagedRecord",
    "Event",
    "Filter",
    "Headline",
    "Journal",
    "JournalReader",
    "Metrics",
    "PartEntry",
    "RowAnnotation",
    "RunStart",
    "RunStatus",
    "SessionTime",
    "TrajectoryEntry",
    "fresh_start",
    "logging_to",
    "read_starts",
]
