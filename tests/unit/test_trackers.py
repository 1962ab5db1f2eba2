"""Trackers: failing to start is an error with its fix, failing to log is one warning, and a run never notices."""

import sys
from types import ModuleType

import pytest

from treadle.config import LoggingConfig
from treadle.errors import ConfigError
from treadle.observe import trackers
from treadle.observe.trackers import Trackers


class Recorder:
    def __init__(self, *_: object) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.texts: list[tuple[int, list[str]]] = []
        self.closed = False

    def log_texts(self, step, texts):
        self.texts.append((step, list(texts)))

    def log(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.closed = True


class Broken(Recorder):
    def log(self, step, metrics):
        raise ConnectionError("the server is away")


def start(monkeypatch, tmp_path, **made) -> Trackers:
    monkeypatch.setattr(trackers, "TRACKERS", {name: lambda *_, made=item: made for name, item in made.items()})
    return Trackers.start(LoggingConfig(logger=("console", *made)), tmp_path, {})


def test_metrics_go_to_every_tracker_and_all_are_closed(monkeypatch, tmp_path):
    first, second = Recorder(), Recorder()
    running = start(monkeypatch, tmp_path, wandb=first, mlflow=second)
    running.log(3, {"reward/mean": 0.5})
    running.close()
    assert first.logged == second.logged == [(3, {"reward/mean": 0.5})]
    assert first.closed and second.closed


def test_transcripts_go_to_every_tracker(monkeypatch, tmp_path):
    first, second = Recorder(), Recorder()
    start(monkeypatch, tmp_path, wandb=first, mlflow=second).log_texts(3, ["user: 1+1?"])
    assert first.texts == second.texts == [(3, ["user: 1+1?"])]


def test_a_tracker_that_cannot_log_is_named_once_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    healthy = Recorder()
    running = start(monkeypatch, tmp_path, wandb=Broken(), mlflow=healthy)
    running.log(1, {})
    running.log(2, {})
    assert capsys.readouterr().err == "warning: wandb cannot log: ConnectionError: the server is away\n"
    assert len(healthy.logged) == 2


def test_a_tracker_that_is_not_installed_is_an_error_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'treadle\[wandb\]'"):
        Trackers.start(LoggingConfig(logger=("wandb",)), tmp_path, {})


def test_a_tracker_that_cannot_start_is_an_error_and_closes_those_that_did(monkeypatch, tmp_path):
    fine = Recorder()

    def refuse(*_):
        raise RuntimeError("no login")

    monkeypatch.setattr(trackers, "TRACKERS", {"mlflow": lambda *_: fine, "wandb": refuse})
    with pytest.raises(ConfigError, match="wandb cannot start: RuntimeError: no login"):
        Trackers.start(LoggingConfig(logger=("mlflow", "wandb")), tmp_path, {})
    assert fine.closed


def test_a_resumed_run_directory_keeps_its_wandb_id(monkeypatch, tmp_path):
    ids = iter(["first", "second"])
    asked = []
    fake = ModuleType("wandb")
    fake.util = ModuleType("util")
    fake.util.generate_id = lambda: next(ids)
    fake.init = lambda **options: asked.append(options["id"])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        Trackers.start(LoggingConfig(logger=("wandb",)), tmp_path, {})
    assert asked == ["first", "first"]
