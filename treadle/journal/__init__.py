"""The run directory: tasks, trajectories, events and metrics of a run, crash-safe and readable while it runs.

run_dir/
  config.yaml      resolved config, with origins; config.1.yaml … of earlier starts where it differed
  run.json         every start: command, versions, host, status, and the cause where it did not finish
  journal.sqlite   everything else; see `schema`
  metrics.jsonl    the metrics once more, for other tools
  run.log          what was said while it ran; see `logfile`
  lock             who holds the directory
"""

from treadle.journal.directory import Start, read_starts
from treadle.journal.journal import Journal, set_aside
from treadle.journal.logfile import logging_to
from treadle.journal.reader import DamagedRecord, JournalReader
from treadle.journal.record import Counts, Entry, Event, Filter, Headline, Metrics, PartEntry, RunStatus, SessionTime

__all__ = [
    "Counts",
    "DamagedRecord",
    "Entry",
    "Event",
    "Filter",
    "Headline",
    "Journal",
    "JournalReader",
    "Metrics",
    "PartEntry",
    "RunStatus",
    "SessionTime",
    "Start",
    "logging_to",
    "read_starts",
    "set_aside",
]
