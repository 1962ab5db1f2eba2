"""Trackers: failing to start is an error with its fix, failing to log is one warning, and a run never notices."""

import socket
import sys
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from treadle.config import LoggingConfig
from treadle.errors import ConfigError
from treadle.observe import trackers
from treadle.observe.trackers import PrometheusEndpoint, Trackers


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


def test_a_port_that_is_taken_is_a_mistake_that_names_the_key(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"logging.prometheus_port: cannot listen on 127.0.0.1"):
            Trackers.start(LoggingConfig(prometheus_port=port), tmp_path, {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_prometheus_reads_the_newest_figures_and_nobody_else_listens(tmp_path):
    logging = LoggingConfig(prometheus_port=free_port(), experiment_name='a "b"')
    running = Trackers.start(logging, tmp_path, {})
    address = f"http://127.0.0.1:{logging.prometheus_port}"
    try:
        running.log(3, {"reward/mean": 0.25, "validation/pass@1": 1.0})
        running.log(4, {"reward/mean": 0.5})
        with urlopen(f"{address}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            lines = answer.read().decode().splitlines()
        labels = 'project="treadle",experiment="a \\"b\\"",metric='
        assert f'treadle_reward_mean{{{labels}"reward/mean"}} 0.5' in lines
        assert f'treadle_validation_pass_1{{{labels}"validation/pass@1"}} 1.0' in lines
        assert f'treadle_step{{{labels}"step"}} 4.0' in lines
        assert lines.count("# TYPE treadle_reward_mean gauge") == 1
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{address}/")
    finally:
        running.close()
    with pytest.raises(URLError):
        urlopen(f"{address}/metrics")


def test_names_that_prometheus_spells_alike_stay_apart():
    endpoint = PrometheusEndpoint(0, {})
    try:
        endpoint.log(1, {"reward/a-b": 1.0, "reward/a_b": 2.0})
        text = endpoint.render()
    finally:
        endpoint.close()
    assert 'treadle_reward_a_b{metric="reward/a-b"} 1.0' in text
    assert 'treadle_reward_a_b{metric="reward/a_b"} 2.0' in text


def test_prometheus_is_off_unless_asked_for(tmp_path):
    assert LoggingConfig().prometheus_port is None
    assert "prometheus" not in Trackers.start(LoggingConfig(), tmp_path, {})._trackers
