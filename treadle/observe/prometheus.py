"""Prometheus endpoint: the newest figures of a run at http://127.0.0.1:PORT/metrics, for a scraper on this machine.

Owns the socket, on the loopback alone, and the text format. Keeps one value for each metric and no history.
Invariant: an answer is one moment's figures; a reader that hangs or goes away holds nobody up.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
READ_TIMEOUT_S = 5.0


class PrometheusEndpoint:
    """A tracker that is asked instead of telling. Port 0 takes a free one; OSError where the port is taken."""

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
                """Scrapes are no news."""

        return Handler


def metric_name(name: str) -> str:
    """`reward/mean` as Prometheus spells it: `treadle_reward_mean`."""
    return "treadle_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
