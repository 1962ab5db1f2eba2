"""What a command reads: every task once, and of the journal nothing for tasks that no earlier start has sampled."""

import asyncio
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from tests.effects.runs import View, prepared
from treadle.cli.rollout import run_evaluation
from treadle.cli.train import run_training
from treadle.cluster import training as cluster
from treadle.data import tasks
from treadle.journal import JournalReader
from treadle.trainer.resume import RunHistory

ASKED_OF_A_TASK = ("trajectory", "attempts", "parts", "task")
"""What a reader of the journal can be asked about one task."""

SHORT = {"trainer.total_training_steps": 2, "checkpoint.save_freq": 0}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read, each time."""
    found = list[str]()
    read = tasks._read_all

    def count_files(names: Any, *rest: Any) -> Any:
        found.extend(names)
        return read(names, *rest)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "_read_all", count_files)
    return found


@pytest.mark.parametrize("sampler", [None, "success_band"])
def test_a_training_command_reads_the_tasks_of_its_checks(files: list[str], sampler: str | None) -> None:
    config = prepared({**SHORT, "data.val_files": ["val.jsonl"], "data.sampler": sampler})
    copyfile("tasks.jsonl", "val.jsonl")
    assert run_training(config, []).steps == 2
    assert sorted(files) == ["tasks.jsonl", "val.jsonl"]


@pytest.mark.parametrize("validation", [False, True])
def test_a_rollout_command_reads_the_tasks_of_its_checks(files: list[str], validation: bool) -> None:
    config = prepared({"data.val_files": ["val.jsonl"], "rollout.val_kwargs.n": 1})
    copyfile("tasks.jsonl", "val.jsonl")
    assert run_evaluation(config, [], validation=validation).summary.num_trajectories
    assert sorted(files) == ["tasks.jsonl", "val.jsonl"]


def test_a_run_reads_tasks_once_and_a_fresh_one_asks_the_journal_for_none(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, looked_up, readers = list[str](), list[str](), list[JournalReader]()
    recover = RunHistory.recover

    def count_recoveries(history: RunHistory, task: Any, *rest: Any, **bounds: Any) -> Any:
        looked_up.append(task.uid)
        readers.append(history._reader)
        return recover(history, task, *rest, **bounds)

    monkeypatch.setattr(RunHistory, "recover", count_recoveries)
    for name in ASKED_OF_A_TASK:
        method = getattr(JournalReader, name)

        def count_questions(reader: JournalReader, uid: str, *rest: Any, method: Any = method) -> Any:
            if reader in readers:  # others read at the end, for findings
                asked.append(uid)
            return method(reader, uid, *rest)

        monkeypatch.setattr(JournalReader, name, count_questions)
    config = prepared(SHORT)
    assert asyncio.run(cluster.train(config, View())).steps == 2
    assert files == ["tasks.jsonl"] and len(looked_up) == 4, "two steps of two tasks"
    assert asked == []
    with pytest.MonkeyPatch.context() as patch:  # else the reader would be asked, and this test would see it
        patch.setattr(JournalReader, "sampled_uids", lambda reader: frozenset(looked_up))
        asyncio.run(cluster.train(prepared({"trainer.total_training_steps": 2, "logging.run_dir": "other"}), View()))
    assert set(asked) == set(looked_up)
