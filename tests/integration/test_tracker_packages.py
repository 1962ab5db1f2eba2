"""Trackers with the real packages, offline: what was logged is read back by each package's own reader.

MLflow's full package pins much of what we use, so it is tested where it is installed: `pip install mlflow`.
"""

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.config import LoggingConfig
from treadle.errors import ConfigError
from treadle.observe import trackers
from treadle.observe.trackers import Trackers

STEPS = ((1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5}), (1, {"validation/pass@1": 1.0}))
"""A validation beside training is told after a later step."""


def log_all(name: str, run_dir: Path) -> None:
    """A run, and its continuation."""
    logging = LoggingConfig(logger=(name,), project_name="project", experiment_name="experiment")
    for steps in (STEPS, [(3, {"reward/mean": 0.75})]):
        running = Trackers.start(logging, run_dir, {"rollout.n": 8})
        for step, metrics in steps:
            running.log(step, metrics)
        running.log_texts(steps[-1][0], ["user: 1+1?\nassistant: 2"])
        running.close()
        assert not running._warned
        ended = int(time.time())
        while int(time.time()) == ended:  # W&B names a run's files by the second
            time.sleep(0.05)


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_all("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(item.step, item.value) for item in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [item.step for item in events.Scalars("validation/pass@1")] == [1]


def test_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_all("wandb", tmp_path)
    rows = read_wandb(tmp_path)
    figures = [{name: row[name] for name in row if "/" in name and "transcripts" not in name} for row in rows]
    assert [(rows[at]["step"], row) for at, row in enumerate(figures) if row] == [*STEPS, (3, {"reward/mean": 0.75})]
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len({name.rpartition("-")[2] for name in runs}) == 1, "a continued run keeps its id"


def read_wandb(run_dir: Path) -> list[dict]:
    """The rows in W&B's own files, in order."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in read_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, which W&B's files are after seven bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def test_trackio(tmp_path, monkeypatch):
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)
    log_all("trackio", tmp_path)
    rows = sqlite_storage.SQLiteStorage.get_logs("project", "experiment")
    rewards = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
    assert rewards == {1: 0.25, 2: 0.5, 3: 0.75}
    assert [row["step"] for row in rows if "validation/pass@1" in row] == [1]


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    if trackers._is_skinny():
        pytest.skip("only mlflow-skinny is installed")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    log_all("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(item.step, item.value) for item in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["validation/pass_1"] == 1.0


def test_a_skinny_mlflow_without_a_server_says_what_to_install(tmp_path, monkeypatch):
    mlflow = type(sys)("mlflow")
    mlflow.get_tracking_uri = lambda: "sqlite:///mlflow.db"
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(trackers, "_is_skinny", lambda: True)
    with pytest.raises(ConfigError, match=r"only mlflow-skinny is installed.*pip install 'treadle\[mlflow\]'"):
        Trackers.start(LoggingConfig(logger=("mlflow",)), tmp_path, {})
