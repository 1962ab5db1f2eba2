"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio, and a Prometheus endpoint. Thin adapters.

Owns the calls of those libraries, imported only when a config names them, and the Prometheus socket: on the loopback
alone, the newest value of each metric at http://127.0.0.1:PORT/metrics, no history.
A tracker that cannot start is an error before the run; one that cannot log is a warning, once, and the run goes on. A
scraper that hangs or goes away delays nothing.
"""

import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from re import sub
from secrets import token_hex
from typing import Any, Protocol, Self

from treadle.config import LoggingConfig
from treadle.errors import ConfigError, Mistake
from treadle.terminal import warn

HOST = "127.0.0.1"
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
READ_TIMEOUT_S = 5.0


class PrometheusEndpoint:
    """Prometheus endpoint: scraped by a server. Port 0 takes a free one; OSError where the port is taken."""

    def __init__(self, port: int, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._values: dict[str, float] = {}
        self._step = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((HOST, port), self._handler())
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step = max(self._step, step)
            self._values.update(metrics)

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        """Texts have no place in this format."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def render(self) -> str:
        """Every figure as a gauge. The label `metric` has the name as everything else spells it."""
        with self._lock:
            values = {"step": float(self._step), **self._values}
        families: dict[str, list[str]] = {}
        for name, value in sorted(values.items()):
            labels = ",".join(f'{key}="{_escape(text)}"' for key, text in {**self._labels, "metric": name}.items())
            families.setdefault(metric_name(name), []).append(f"{{{labels}}} {value!r}")
        lines = []
        for family, samples in families.items():
            lines += [f"# TYPE {family} gauge", *(family + sample for sample in samples)]
        return "\n".join([*lines, ""])

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_TIMEOUT_S

            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                body = endpoint.render().encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", TEXT_FORMAT if found else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not logged."""

        return Handler


def metric_name(name: str) -> str:
    """`reward/mean` as Prometheus spells it: `treadle_reward_mean`."""
    return "treadle_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Tracker(Protocol):
    """Receiver of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        """Transcripts of a validation."""
        ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in `<run_dir>/tensorboard`."""

    def __init__(self, logging: LoggingConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown for: as it is
            self._writer.add_text(f"validation/{number}", indented, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run in `logging.project_name`, continued under the same id when the run directory is.

    `step` is an own metric that all others are drawn over: W&B drops values of a step that has passed, and the
    figures of a validation beside training come late.
    """

    def __init__(self, logging: LoggingConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=logging.project_name,
            name=logging.experiment_name,
            dir=str(run_dir),
            config=dict(config),
            resume="allow",
            id=_kept(run_dir / "wandb_id", lambda: token_hex(4)),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        table = self._wandb.Table(columns=["transcript"], data=[[text] for text in texts])
        self._run.log({"validation/transcripts": table, "step": step})

    def close(self) -> None:
        self._run.finish()


class MLflowTracker:
    """A run in the experiment `logging.project_name`, at the address MLflow itself is set to; continued like W&B's.

    Without an address MLflow keeps a database in the working directory, which the skinny package cannot.
    """

    def __init__(self, logging: LoggingConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        if _is_skinny() and not mlflow.get_tracking_uri().startswith(("http", "databricks")):
            raise RuntimeError(
                "only mlflow-skinny is installed, which has no store of its own: pip install 'treadle[mlflow]', or set "
                "MLFLOW_TRACKING_URI to the address of a server"
            )
        mlflow.set_experiment(logging.project_name)
        file = run_dir / "mlflow_id"
        begun = file.read_text().strip() if file.exists() else None
        started = mlflow.start_run(run_id=begun, run_name=logging.experiment_name)
        _kept(file, lambda: started.info.run_id)
        mlflow.log_dict(dict(config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_plain(name): value for name, value in metrics.items()}, step=step)

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        self._mlflow.log_text("\n\n".join(texts), f"validation/step-{step}.txt")

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioTracker:
    """A run in `logging.project_name`, where trackio itself keeps runs; continued by its name."""

    def __init__(self, logging: LoggingConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self._trackio: Any = trackio
        with redirect_stdout(sys.stderr):  # it prints a greeting
            self._run: Any = trackio.init(
                project=logging.project_name, name=logging.experiment_name, config=dict(config), resume="allow"
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        text = "\n\n".join(f"```text\n{text}\n```" for text in texts)
        self._run.log({"validation/transcripts": self._trackio.Markdown(text)}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


TRACKERS: Mapping[str, Callable[[LoggingConfig, Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
    "trackio": TrackioTracker,
}


class Trackers:
    """All trackers of a run behind one call."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._warned: set[str] = set()

    @classmethod
    def start(cls, logging: LoggingConfig, run_dir: Path, config: Mapping[str, Any]) -> Self:
        """Every tracker that `logging.logger` names, or an error that says which cannot start and why."""
        started: dict[str, Tracker] = {}
        mistakes: list[Mistake] = []
        for name in logging.logger:
            if name in TRACKERS:
                try:
                    started[name] = TRACKERS[name](logging, run_dir, config)
                except ImportError as error:
                    problem, fix = f"{name} is not installed ({error})", f"pip install 'treadle[{name}]'"
                    mistakes.append(Mistake("logging.logger", problem, name, fix=fix, missing="package"))
                except Exception as error:  # noqa: BLE001  whatever a tracker's start raises means it cannot start
                    problem = f"{name} cannot start: {type(error).__name__}: {error}"
                    mistakes.append(Mistake("logging.logger", problem, name))
        if logging.prometheus_port is not None:
            labels = {"project": logging.project_name, "experiment": logging.experiment_name}
            try:
                started["prometheus"] = PrometheusEndpoint(logging.prometheus_port, labels)
            except OSError as error:
                key, origin = "logging.prometheus_port", logging.origin("prometheus_port")
                problem = f"cannot listen on {HOST}: {error.strerror}"
                mistakes.append(Mistake(key, problem, logging.prometheus_port, origin, "choose another port"))
        if mistakes:
            cls(started).close()
            raise ConfigError(mistakes)
        return cls(started)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics everywhere. A tracker that fails is named once, on standard error."""
        self._everywhere(lambda tracker: tracker.log(step, metrics), "log")

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        """Send transcripts everywhere."""
        self._everywhere(lambda tracker: tracker.log_texts(step, texts), "log transcripts")

    def close(self) -> None:
        self._everywhere(lambda tracker: tracker.close(), "close")

    def _everywhere(self, call: Callable[[Tracker], None], what: str) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  a tracker must never end a run
                if name not in self._warned:
                    self._warned.add(name)
                    warn(f"warning: {name} cannot {what}: {type(error).__name__}: {error}")


def _kept(file: Path, make: Callable[[], str]) -> str:
    """Content of the file in this run directory, made now if there is none."""
    if not file.exists():
        file.write_text(make())
    return file.read_text().strip()


def _is_skinny() -> bool:
    """Whether mlflow-skinny is installed, which only sends to servers."""
    try:
        return not distribution("mlflow")
    except PackageNotFoundError:
        return True


def _plain(name: str) -> str:
    """A metric's name in the letters that MLflow takes: `pass@1` is `pass_1`."""
    return sub(r"[^\w\-. /:]", "_", name)
