"""Viewer server: the pages of runs over HTTP, on this machine alone.

Owns the address, the secret in it, the routes and the headers. Answers GET alone; listens on 127.0.0.1; every
path begins with a random token, and a request whose Host names another machine is refused, so that no web page can
read a run by pointing a name of its own at this address. Text of models reaches the browser as JSON or as text alone:
the policy in every answer forbids scripts, styles and connections other than our own three files.
"""

import json
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from treadle.errors import ConfigError, Mistake, RunError, TreadleError
from treadle.inspect.detectors import RunFinding
from treadle.inspect.findings import OF_GROUPS, RunScan
from treadle.inspect.transcript import CONTENT
from treadle.view.difference import RowPlace, compare_rows, locate
from treadle.view.export import export_jsonl, export_page
from treadle.view.find import Indexes, find
from treadle.view.queries import Json
from treadle.view.run_pages import RunPages
from treadle.view.trajectory_pages import TrajectoryPages

if TYPE_CHECKING:
    from treadle.inspect.timeline import TimelineReader

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Given = Mapping[str, str]
LARGEST = 2**63 - 1
"""What SQLite takes for a whole number."""
SCAN_S = 0.4
"""Seconds that one answer spends on looking for findings."""
FINDING_S = 20.0
"""Seconds that the export of a finding looks for it."""
TIMELINE_S = 0.25
"""Seconds that one picture of the timeline spends on reading."""


class ViewedRun:
    """One run of a viewer, with everything that answers questions about it."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.pages = RunPages(name, run_dir)
        self.trajectories = TrajectoryPages(self.pages)
        self._indexes: Indexes | None = None
        self._scan: RunScan | None = None
        self._scanning = threading.Lock()
        self._timeline: TimelineReader | None = None
        self._drawing = threading.Lock()
        self._lock = threading.Lock()

    @property
    def indexes(self) -> Indexes:
        """Made by the first search."""
        with self._lock:
            if self._indexes is None:
                self._indexes = Indexes.of(self.pages)
            return self._indexes

    def close(self) -> None:
        with self._lock:
            if self._indexes is not None:
                self._indexes.texts.close()

    def timeline(self) -> bytes:
        """A picture of the run up to now: of its newest part at first, and of more with every answer."""
        from treadle.inspect.timeline import TimelineReader
        from treadle.inspect.timeline_svg import draw_svg

        with self._drawing:
            if self._timeline is None:
                self._timeline = TimelineReader(self.pages.run_dir)
            return draw_svg(self._timeline.read(TIMELINE_S)).encode()

    def timeline_read(self) -> Json:
        """How much of the run the last picture was of."""
        with self._drawing:
            return {"share": 1.0 if self._timeline is None else self._timeline.share}

    def findings(self) -> Json:
        """What a scan finds in as much of the run as one answer has time for; the next one goes on."""
        with self._scanning:
            if self._scan is None:
                self._scan = RunScan(self.pages.run_dir)
            return self._scan.report(SCAN_S).to_json()


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a response."""

    body: bytes
    kind: str = "application/json"
    file_name: str | None = None
    """Where the browser is to save it."""


class NoSuchPage(TreadleError):
    """A path that the viewer has no answer for."""


class Viewer:
    """The runs of one server, and what each path of it answers."""

    def __init__(self, runs: Mapping[str, Path]) -> None:
        self._runs = {name: ViewedRun(name, run_dir) for name, run_dir in runs.items()}
        self._routes: dict[str, Callable[[ViewedRun, Given], Json | Sequence[Json] | Answer]] = {
            "overview": lambda run, given: run.pages.overview(),
            "ends": lambda run, given: run.pages.ends(),
            "metrics": lambda run, given: run.pages.metrics(given["names"].split(",") if "names" in given else None),
            "steps": lambda run, given: run.pages.steps(_number(given, "before")),
            "groups": lambda run, given: run.pages.groups(
                _number(given, "step"), _number(given, "validation"), given.get("after", "")
            ),
            "group": lambda run, given: run.pages.group(_needed(given, "uid"), _number(given, "step")),
            "find": lambda run, given: find(run.pages, run.indexes, given),
            "config": lambda run, given: self._config(run, given.get("other")),
            "waits": lambda run, given: run.pages.waits(),
            "timeline": lambda run, given: _draw_timeline(run),
            "timeline_read": lambda run, given: run.timeline_read(),
            "trajectory": lambda run, given: run.trajectories.trajectory(_id(given)),
            "message": lambda run, given: run.trajectories.message(
                _id(given), _number(given, "at") or 0, given.get("field") or CONTENT
            ),
            "tokens": lambda run, given: run.trajectories.tokens(
                _id(given), _number(given, "row") or 0, _number(given, "start") or 0
            ),
            "row_text": lambda run, given: run.trajectories.row_text(_id(given), _number(given, "row") or 0),
            "strip": lambda run, given: run.trajectories.strip(_id(given), _number(given, "row") or 0),
            "diff": self._diff,
            "locate": lambda run, given: locate(run.trajectories, _needed(given, "name")),
            "findings": lambda run, given: run.findings(),
            "export": _export,
        }

    def close(self) -> None:
        """Free what runs hold. Closing twice is harmless."""
        for run in self._runs.values():
            run.close()

    def answer(self, path: str, given: Given) -> Answer:
        """What a path below the token answers. RunError: a sentence for the screen."""
        if path in FILES:
            name, kind = FILES[path]
            return Answer((STATIC / name).read_bytes(), kind)
        parts = path.split("/")
        if parts == ["api", "runs"]:
            return _json([self._describe(name) for name in self._runs])
        if parts == ["api", "pulse"]:
            return _json({name: _pulse(run) for name, run in self._runs.items()})
        if len(parts) == 2 and parts[0] == "api" and parts[1] in self._routes:
            found = self._routes[parts[1]](self._run(given.get("run", "")), given)
            return found if isinstance(found, Answer) else _json(found)
        raise NoSuchPage(path)

    def _run(self, name: str) -> ViewedRun:
        if name not in self._runs:
            raise RunError(f"no run {name!r} is open in this viewer: treadle view RUN … names them")
        return self._runs[name]

    def _describe(self, name: str) -> Json:
        run = self._runs[name]
        described = {"name": name, "dir": str(run.pages.run_dir)}
        try:
            return {**described, "pulse": run.pages.pulse()}
        except RunError as error:
            return {**described, "problem": str(error)}

    def _config(self, run: ViewedRun, other: str | None) -> Json:
        theirs = {line["key"]: line for line in self._run(other).pages.config()} if other else {}
        lines = run.pages.config()
        for line in lines:
            there = theirs.pop(line["key"], None)
            line["other"] = None if there is None else there["value"]
        missing = [
            {"key": key, "value": None, "origin": line["origin"], "other": line["value"]}
            for key, line in theirs.items()
        ]
        return {"keys": [*lines, *missing], "compared": other}

    def _diff(self, run: ViewedRun, given: Given) -> Json:
        other = self._run(given["other_run"]) if given.get("other_run") else run
        other_id = _number(given, "other")
        if other_id is None:
            raise RunError("a difference needs two trajectories: id and other")
        return compare_rows(
            RowPlace(run.trajectories, _id(given), _number(given, "row") or 0),
            RowPlace(other.trajectories, other_id, _number(given, "other_row") or 0),
            responses=given.get("from") == "responses",
            skip=_number(given, "skip") or 0,
        )


def _pulse(run: ViewedRun) -> Json:
    try:
        return run.pages.pulse()
    except RunError as error:
        return {"problem": str(error)}


def _draw_timeline(run: ViewedRun) -> Answer:
    """The picture that a run drew when it ended; of a run that goes on, one of now."""
    drawn = run.pages.drawn_timeline()
    return Answer(drawn if drawn is not None else run.timeline(), "image/svg+xml")


def _export(run: ViewedRun, given: Given) -> Answer:
    """One trajectory, all samples of a task, or a finding (with its span marked, and what it says), as one file."""
    found = _finding(run, given) if "kind" in given else None
    if found is not None and found.kind in OF_GROUPS:
        given = {**given, "uid": found.uid} | ({} if found.step is None else {"step": str(found.step)})
    if "uid" in given:
        ids = [line["id"] for line in run.pages.group(_needed(given, "uid"), _number(given, "step"))["samples"]]
    else:
        ids = [_id(given)]
    name = f"{run.pages.name}-{'group-' if 'uid' in given else ''}{ids[0]}"
    name += "" if found is None else f"-{found.kind}"
    if given.get("form") == "jsonl":
        lines = export_jsonl(run.pages, ids, found)
        return Answer(lines.encode("utf-8", "backslashreplace"), "application/x-ndjson", f"{name}.jsonl")
    page = export_page(run.trajectories, ids, found).encode("utf-8", "backslashreplace")
    return Answer(page, "text/html; charset=utf-8", f"{name}.html")


def _finding(run: ViewedRun, given: Given) -> RunFinding:
    """The finding that an address names by its kind, its trajectory and where its span begins."""
    wanted, ends = (given["kind"], _id(given), _number(given, "start")), time.monotonic() + FINDING_S
    while True:
        report = run.findings()
        for found in report["findings"]:
            if (found["kind"], found["id"], found["start"]) == wanted:
                return RunFinding(**found)
        if report["is_over"]:
            break
        if time.monotonic() > ends:
            raise RunError(f"the findings of this run were not read within {FINDING_S:.0f} s: ask again, which goes on")
    raise RunError(f"there is no finding {given['kind']!r} of trajectory {wanted[1]} among the newest of this run")


def _json(value: object) -> Answer:
    try:
        text = _dump(value)
    except ValueError:  # a NaN or an infinity of a loop, a tool, a reward function or a row of data
        text = _dump(_spell_out(value))
    return Answer(text.encode())


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _spell_out(value: object) -> object:
    """A copy in which numbers that JSON cannot hold are texts: `nan`, `inf`, `-inf`."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _spell_out(item) for name, item in value.items()}
    return [_spell_out(item) for item in value] if isinstance(value, list | tuple) else value


def _number(given: Given, name: str) -> int | None:
    text = given.get(name)
    if text is None or text == "":
        return None
    try:
        number = int(text)
    except ValueError:
        raise RunError(f"{name} must be a whole number, not {text[:80]!r}") from None
    if abs(number) > LARGEST:
        raise RunError(f"{name} must be below 2^63 in size, not {text[:80]}")
    return number


def _id(given: Given) -> int:
    found = _number(given, "id")
    if found is None:
        raise RunError("the address names no trajectory: it needs id")
    return found


def _needed(given: Given, name: str) -> str:
    if not given.get(name):
        raise RunError(f"the address needs {name}")
    return given[name]


class ViewerServer(ThreadingHTTPServer):
    """A started server; `serve_forever` answers until `shutdown`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: Mapping[str, Path], port: int = 0) -> None:
        self.viewer = Viewer(runs)
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            problem = f"cannot listen on 127.0.0.1:{port}: {error.strerror or error}"
            raise ConfigError([Mistake("--port", problem, port, fix="leave it out to get a free one")]) from error

    def server_close(self) -> None:
        super().server_close()
        self.viewer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, address = super().get_request()
        connection.settimeout(30)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that has left is no news; what else breaks outside an answer is a bug, and logged."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            log.warning("a connection of the viewer broke", exc_info=True)

    def allows(self, host: str | None) -> bool:
        """Whether a request was meant for this machine by a name that only it has."""
        port = self.server_address[1]
        return host in (f"127.0.0.1:{port}", f"localhost:{port}")


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server_version = "treadle"
    sys_version = ""
    server: ViewerServer

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        token, _, path = unquote(split.path.removeprefix("/"), errors="replace").partition("/")
        if not self.server.allows(self.headers.get("Host")) or not _same(token, self.server.token):
            self._send(HTTPStatus.NOT_FOUND, Answer(b"not found", "text/plain; charset=utf-8"))
            return
        try:
            answer = self.server.viewer.answer(path, dict(parse_qsl(split.query, errors="replace")))
        except NoSuchPage:
            self._send(HTTPStatus.NOT_FOUND, Answer(b"not found", "text/plain; charset=utf-8"))
        except TreadleError as error:
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, _json({"error": str(error)}))
        except Exception as error:  # a bug of the viewer: one answer is lost, and said so
            log.warning("the viewer could not answer %s", path, exc_info=True)
            told = f"the viewer could not answer {path}: {type(error).__name__}: {error} (a bug; see its terminal)"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, _json({"error": told}))
        else:
            self._send(HTTPStatus.OK, answer)

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.file_name is not None:
            safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in answer.file_name)
            self.send_header("Content-Disposition", f'attachment; filename="{safe}"')
        try:
            self.end_headers()
            self.wfile.write(answer.body)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the browser has left the page

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed: the terminal belongs to the user."""


def _same(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())
