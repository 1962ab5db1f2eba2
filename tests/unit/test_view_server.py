"""The viewer's server: this machine alone, by a token alone, GET alone, with a policy on every answer."""

import itertools
import json
import math
import re
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.rollouts import task
from tests.view_runs import annotated, made, sampled, trained, write_run
from treadle.cli.main import main
from treadle.errors import RunError
from treadle.journal import Journal
from treadle.types import Score, ToolCall
from treadle.view import export
from treadle.view import server as view_server
from treadle.view.run_pages import RunPages
from treadle.view.server import FILES, HEADERS, STATIC, ViewerServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ViewerServer]:
    runs = {"one": write_run(tmp_path / "one"), "other/run": write_run(tmp_path / "two", made("c", 0, 1.0))}
    server = ViewerServer(runs)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def ask(server: ViewerServer, path: str) -> object:
    status, _, body = get(f"{server.url}api/{path}")
    assert status == 200, body
    return json.loads(body)


def test_it_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32


def reset(server: ViewerServer, sent: bytes) -> None:
    """Send a beginning of a request, and reset the connection as a browser does that is closed."""
    with socket.create_connection(server.server_address) as client:
        client.sendall(sent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_connection_that_is_reset_prints_nothing(server, capfd, monkeypatch):
    """While its request is read, before its answer and inside it."""
    ended, held = threading.Semaphore(0), threading.Event()
    closes, pages = ViewerServer.shutdown_request, RunPages.steps
    monkeypatch.setattr(ViewerServer, "shutdown_request", lambda *given: (closes(*given), ended.release()))
    monkeypatch.setattr(RunPages, "steps", lambda *given: (held.wait(60), pages(*given))[1])
    steps = f"GET /{server.token}/api/steps?run=one HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\n\r\n"
    for sent in (b"GET / HT", b"GET / HTTP/1.1\r\nHost: x", steps.encode()):
        reset(server, sent)
        held.set()
        assert ended.acquire(timeout=90)
    assert capfd.readouterr() == ("", "")
    assert ask(server, "overview?run=one")["steps"] == [1, 2]


def test_a_response_whose_reader_has_left_prints_nothing(server, capfd, monkeypatch):
    ended = threading.Semaphore(0)
    closes = ViewerServer.shutdown_request
    monkeypatch.setattr(ViewerServer, "shutdown_request", lambda *given: (closes(*given), ended.release()))

    def left(self):
        raise ConnectionResetError

    monkeypatch.setattr(view_server._Handler, "end_headers", left)
    with socket.create_connection(server.server_address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ended.acquire(timeout=90)
    assert capfd.readouterr() == ("", "")


def test_without_the_token_there_is_nothing(server):
    root = server.url.removesuffix(f"{server.token}/")
    for path in ("", "api/runs", "wrong/api/runs", f"{server.token[:-1]}/", "app.js", "%00/"):
        status, headers, body = get(root + path)
        assert (status, body) == (404, b"not found"), path
        assert headers["Content-Security-Policy"]


def test_a_name_that_another_site_points_here_is_refused(server):
    assert get(server.url, Host="evil.example:80")[0] == 404
    assert get(server.url, Host=f"localhost:{server.server_address[1]}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_answered(server, method):
    request = urllib.request.Request(f"{server.url}api/runs", method=method, data=b"{}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    refused.value.close()
    assert refused.value.code == 501


def test_every_answer_has_the_policy(server):
    for path in ("", "app.js", "style.css", "api/runs", "api/overview?run=one", "api/nothing"):
        _, headers, _ = get(server.url + path)
        for name, value in HEADERS.items():
            assert headers[name] == value, path
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy


def test_the_page_is_three_files_without_inline_code_or_foreign_addresses():
    assert sorted(path.name for path in STATIC.iterdir()) == sorted(name for name, _ in FILES.values())
    page, code = (STATIC / "index.html").read_text(), (STATIC / "app.js").read_text()
    assert "onclick=" not in page and "<script>" not in page and "style=" not in page
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in code, word
    assert "https://" not in page + code and code.count("http://") == 1  # the namespace of SVG


def test_every_route_answers_with_strict_json(server):
    for path in (
        *("runs", "pulse", "overview?run=one", "ends?run=one", "metrics?run=one&names=reward/mean", "steps?run=one"),
        *("groups?run=one&step=1", "groups?run=one&validation=0", "group?run=one&uid=a", "find?run=one&q=four"),
        *("config?run=one&other=other/run", "waits?run=one", "trajectory?run=one&id=3", "message?run=one&id=3&at=0"),
        *("tokens?run=one&id=3&row=1", "strip?run=one&id=3", "diff?run=one&id=2&other=3", "findings?run=one"),
        *("diff?run=one&id=2&other=8&other_run=other/run", "diff?run=one&id=3&row=1&other=1&from=responses&skip=2"),
        "locate?run=one&name=a/1",
    ):
        assert ask(server, path) is not None, path


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("overview?run=nobody", "no run 'nobody'"),
        ("trajectory?run=one&id=999", "no trajectory 999"),
        ("trajectory?run=one&id=x", "whole number"),
        ("trajectory?run=one", "needs id"),
        ("group?run=one&uid=nobody", "no trajectory of a task 'nobody'"),
        ("groups?run=one&step=77", "no training step 77"),
        ("tokens?run=one&id=3&row=9", "row 9"),
        ("find?run=one&min_reward=many", "must be a number"),
        ("timeline?run=one", "no timeline"),
    ],
)
def test_a_bad_question_is_answered_by_a_sentence(server, path, told):
    status, _, body = get(f"{server.url}api/{path}")
    assert status == 422
    assert told in json.loads(body)["error"]


def test_numbers_that_are_not_finite_are_answered_as_text(tmp_path):
    """In what a loop noted, in a reward's extra, in the arguments of a call and in the ground truth."""
    nan, inf = math.nan, math.inf
    row = sampled((20, 30, 31, 32, 33, 40, 41))
    call = ToolCall("calculate", {"at": nan})
    row = replace(row, turns=(replace(row.turns[0], calls=(call,)),))
    item = made("n", 0, None, rows=(row,), extra={"a": nan, "deep": [{"b": -inf}]})
    item = replace(item, reward=Score(1.0, {"answer": 1.0}, {"c": inf}))
    run_dir = write_run(tmp_path / "run", item)
    with Journal.open(run_dir, max_mb=50) as journal:
        journal.add_task(task("n", ground_truth=[inf, 4]))
    server = ViewerServer({"run": run_dir})
    try:
        shown = json.loads(server.viewer.answer("api/trajectory", {"run": "run", "id": "8"}).body)
        group = json.loads(server.viewer.answer("api/group", {"run": "run", "uid": "n"}).body)
    finally:
        server.server_close()
    assert shown["extra"] == {"trajectory": {"a": "nan", "deep": [{"b": "-inf"}]}, "score": {"c": "inf"}}
    assert shown["rows_shown"][0]["turns"][0]["calls"][0]["arguments"] == {"at": "nan"}
    assert shown["task"]["ground_truth"] == group["task"]["ground_truth"] == ["inf", 4]
    assert shown["reward"] == 1.0


def test_a_run_that_breaks_is_named_and_the_others_stay(server, tmp_path):
    (tmp_path / "one" / "journal.sqlite").write_bytes(b"not a journal at all" * 100)
    one, other = ask(server, "runs")
    assert "cannot read the journal" in one["problem"] and "pulse" in other


DAMAGED = {
    "metrics": ("UPDATE metrics SET items = '{\"reward/mean\": 0.' WHERE step = 1", "a measurement of step 1"),
    "a digit": ("UPDATE metrics SET items = replace(items, '0.5', '0.6')", "a measurement of step 1"),
    "text": ("UPDATE texts SET messages = substr(messages, 1, 9)", "the text of trajectory"),
    "prompt": ("UPDATE prompts SET messages = '[{'", "the "),
    "extra": ("UPDATE texts SET extra = '{\"$float\": []}'", "the extra of trajectory"),
    "turns": ("UPDATE rows SET turns = '[{}'", "of trajectory"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_record_is_a_sentence_and_no_bug(server, tmp_path, what):
    sql, told = DAMAGED[what]
    with sqlite3.connect(tmp_path / "one" / "journal.sqlite") as connection:
        connection.execute(sql)
    connection.close()
    told_by = []
    for path in (
        *(
            "metrics?run=one",
            "overview?run=one",
            "steps?run=one",
            "waits?run=one",
            "groups?run=one",
            "findings?run=one",
        ),
        *("group?run=one&uid=a", "trajectory?run=one&id=3", "message?run=one&id=3&at=0", "tokens?run=one&id=3"),
        *(
            "find?run=one&q=four",
            "find?run=one&tool=calculate",
            "export?run=one&id=3",
            "export?run=one&id=3&form=jsonl",
        ),
    ):
        status, _, body = get(f"{server.url}api/{path}")
        assert status in (200, 422), (path, body)
        if status == 422 or told in body.decode():
            told_by.append(path)
            assert told in body.decode() or "is not as it was written" in body.decode(), (path, body)
    assert told_by
    assert "is damaged there" in get(f"{server.url}api/{told_by[0]}")[2].decode()


def test_exports_are_files_of_their_own(server):
    status, headers, body = get(f"{server.url}api/export?run=one&id=3")
    assert status == 200 and 'filename="one-3.html"' in headers["Content-Disposition"]
    page = body.decode()
    assert "<script" not in page and "default-src 'none'" in page and "question of a" in page
    _, headers, body = get(f"{server.url}api/export?run=one&uid=a&form=jsonl")
    lines = [json.loads(line) for line in body.splitlines()]
    assert [(line["uid"], line["sample"], line["reward"]) for line in lines] == [("a", 0, 0.0), ("a", 1, 1.0)]


def test_an_export_escapes_what_models_wrote(tmp_path):
    from treadle.view.export import export_page
    from treadle.view.run_pages import RunPages
    from treadle.view.trajectory_pages import TrajectoryPages

    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>'\""
    run_dir = write_run(tmp_path / "run", made(hostile, 0, 1.0, hostile, parts={hostile: 1.0}))
    page = export_page(TrajectoryPages(RunPages("run", run_dir)), [8])
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;alert(1)" in page


def test_a_finding_is_exported_with_its_span_marked(tmp_path):
    code = "import os  # <b>\nos._exit(0)"
    server = ViewerServer({"run": write_run(tmp_path / "run", made("c", 0, 1.0, code), made("c", 1, 0.0, "x"))})
    try:
        finding = next(
            item
            for item in json.loads(server.viewer.answer("api/findings", {"run": "run"}).body)["findings"]
            if item["kind"] == "tampering"
        )
        where = {"run": "run", **{key: str(finding[key]) for key in ("kind", "id", "start")}}
        page = server.viewer.answer("api/export", where).body.decode()
        (line,) = server.viewer.answer("api/export", {**where, "form": "jsonl"}).body.splitlines()
        group = json.loads(server.viewer.answer("api/findings", {"run": "run"}).body)["findings"]
    finally:
        server.server_close()
    assert "import os  # &lt;b&gt;\n<mark>os._exit(</mark>0)" in page
    assert "rewarded 1, and wrote" in page
    assert json.loads(line)["finding"] == finding
    assert finding in group


def test_a_replaced_trajectory_is_exported_as_itself(tmp_path):
    """One that a later attempt replaced, and one whose name another has since a resume; and a number that is none."""
    run_dir = write_run(tmp_path / "run", made("c", 0, 0.0, "first"))
    with Journal.open(run_dir, max_mb=50) as journal:
        journal.add(made("c", 0, 1.0, "same name"))
        journal.add(made("c", 0, 1.0, "second", attempt=1))
    server = ViewerServer({"run": run_dir})
    try:
        lines = {
            id: [json.loads(line) for line in server.viewer.answer("api/export", exported_lines(id)).body.splitlines()]
            for id in ("8", "9", "10")
        }
        with pytest.raises(RunError, match="no trajectory 99"):
            server.viewer.answer("api/export", exported_lines("99"))
    finally:
        server.server_close()
    said = {id: [(line["messages"][1]["content"], line["step"]) for line in found] for id, found in lines.items()}
    assert said == {"8": [("first", None)], "9": [("same name", 3)], "10": [("second", None)]}


def exported_lines(id: str) -> dict[str, str]:
    return {"run": "run", "id": id, "form": "jsonl"}


def test_a_finding_is_exported_before_the_scan_of_its_run_is_over(tmp_path, monkeypatch):
    """Its address names a finding of the oldest group; each answer of the scan has time for one group."""
    run_dir = write_run(tmp_path / "run", made("c", 0, 1.0, "os._exit(0)"), made("c", 1, 0.0, "x"))
    with Journal.open(run_dir, max_mb=50) as journal:
        for step in range(4, 9):
            trained(journal, step, made(f"t{step}", 0, 0.0), made(f"t{step}", 1, 1.0))
    monkeypatch.setattr(view_server, "SCAN_S", 0.0)
    server = ViewerServer({"run": run_dir})
    where = {"run": "run", "kind": "tampering", "id": "8", "start": "0"}
    try:
        page = server.viewer.answer("api/export", where).body.decode()
        with pytest.raises(RunError, match="no finding 'gap'"):
            server.viewer.answer("api/export", {**where, "kind": "gap"})
    finally:
        server.server_close()
    assert "<mark>os._exit(</mark>0)" in page


def test_a_finding_about_a_group_is_exported_with_the_whole_group(tmp_path):
    server = ViewerServer({"run": write_run(tmp_path / "run", made("c", 0, 1.0), made("c", 1, 1.0))})
    try:
        where = {"run": "run", "kind": "no_signal", "id": "8", "form": "jsonl"}
        lines = [json.loads(line) for line in server.viewer.answer("api/export", where).body.splitlines()]
    finally:
        server.server_close()
    assert [(line["sample"], line["finding"]["kind"]) for line in lines] == [(0, "no_signal"), (1, "no_signal")]


def exported(server: ViewerServer, kind: str) -> str:
    """The page of the first finding of a kind."""
    found = json.loads(server.viewer.answer("api/findings", {"run": "run"}).body)["findings"]
    item = next(item for item in found if item["kind"] == kind)
    where = {"run": "run", **{key: str(item[key]) for key in ("kind", "id", "start")}}
    return server.viewer.answer("api/export", where).body.decode()


def test_a_span_far_into_a_long_row_is_in_its_export(tmp_path, monkeypatch):
    """From shortly before the span on, with what is left out on both sides; also of a row far behind the first."""
    monkeypatch.setattr(export, "MAX_TOKENS", 1000)
    monkeypatch.setattr(export, "MAX_ROWS", 3)
    rows = [sampled((at, 30, 31, 9, 8)) for at in range(5)]
    rows[4] = sampled(tuple((at * at) % 251 for at in range(1500)) + (7, 8, 9) * 600 + tuple(range(60, 90)))
    server = ViewerServer({"run": write_run(tmp_path / "run", made("c", 0, 1.0, rows=tuple(rows)))})
    try:
        page = exported(server, "repetition")
    finally:
        server.server_close()
    assert page.count("<mark") == 800 and "tokens of row 4" in page and "tokens of row 2" not in page
    assert "1,303 tokens before these" in page  # 3 of the prompt and 1,500, less 200
    assert "1,030 tokens after these, 1,000 of them to be marked" in page and "… 2 more rows" in page


def test_a_gap_is_exported_with_both_sides_of_its_token(tmp_path):
    item = made("c", 0, 1.0)
    run_dir = write_run(tmp_path / "run", item)
    with Journal.open(run_dir, max_mb=50) as journal:
        current = replace(item, sample=1, rows=(sampled(item.rows[0].ids, version=3),))
        trained(journal, 4, current)
        journal.add_annotations([annotated(current, (0.0, -0.25, -2.5, -0.75, -1.0), step=4)])
        journal.flush_blocking()
    server = ViewerServer({"run": run_dir})
    try:
        page = exported(server, "gap")
    finally:
        server.server_close()
    assert page.count("<mark") == 1
    assert 'title="token 5: sampler -0.50000, trainer -2.50000, gap -2.00000"' in page
    assert "<td>-0.50000</td><td>-2.50000</td><td>-2.00000</td>" in page


def test_an_export_writes_out_control_characters_and_half_pairs(tmp_path):
    """Of every field that it shows."""
    evil = "\u202egnp.exe\x1b[2J\x9b\x00 \ud800"
    item = made(f"u {evil}", 0, 1.0, evil, parts={evil: 1.0}, data_source=evil)
    message = {"role": "assistant", "content": evil, "name": evil, "reasoning_content": evil}
    call = {"name": evil, "arguments": evil}
    item = replace(item, messages=({"role": evil, "content": evil}, {**message, "tool_calls": [call]}))
    server = ViewerServer({"run": write_run(tmp_path / "run", item)})
    try:
        page = server.viewer.answer("api/export", {"run": "run", "id": "8"}).body.decode()
        assert server.viewer.answer("api/export", {"run": "run", "id": "8", "form": "jsonl"}).body.isascii()
    finally:
        server.server_close()
    assert not any(letter in page for letter in "\u202e\x1b\x9b\x00")
    assert page.count("U+202E") >= 8 and page.count("U+D800") >= 8


HUGE = "9" * 30


@pytest.mark.parametrize(
    "path",
    [
        *(f"trajectory?run=one&id={HUGE}", f"tokens?run=one&id=2&row={HUGE}", f"steps?run=one&before={HUGE}"),
        *(f"find?run=one&version={HUGE}", f"find?run=one&min_tokens={HUGE}", f"find?run=one&before={HUGE}"),
        *("groups?run=one&step=1&after=x", "find?run=one&q=%00", "find?run=one&q=%ED%A0%80", "find?run=one&q=%22"),
        *("find?run=one&tool=%ED%A0%80", "find?run=one&part=%ED%A0%80%3C1", "find?run=one&q=NEAR(", "find?run=one&q=*"),
        *("message?run=one&id=2&at=0&field=x", "export?run=one&id=2&kind=gap", "export?run=one&id=2&kind=gap&start=x"),
    ],
)
def test_no_question_is_answered_by_a_traceback(server, path):
    status, _, body = get(f"{server.url}api/{path}")
    assert status in (200, 422), body
    assert status == 200 or json.loads(body)["error"]


def test_a_bug_of_the_viewer_is_said_in_its_answer(server, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(RunPages, "steps", lambda *given: broken(given))
    status, _, body = get(f"{server.url}api/steps?run=one")
    assert status == 500 and "ZeroDivisionError: of a test" in json.loads(body)["error"]
    assert ask(server, "overview?run=one")["steps"] == [1, 2]


def test_the_command_refuses_what_is_no_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["view", str(tmp_path / "nothing")])
    assert ended.value.code == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_the_command_refuses_a_port_that_is_taken(server, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["view", str(tmp_path / "one"), "--no-browser", "--port", str(server.server_address[1])])
    assert ended.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_a_viewer_loads_no_torch(tmp_path):
    run_dir = write_run(tmp_path / "run")
    code = f"""
import sys
from pathlib import Path
from treadle.view.server import Viewer
viewer = Viewer({{"run": Path({str(run_dir)!r})}})
for path in ("overview", "steps", "groups", "find", "findings"):
    viewer.answer("api/" + path, {{"run": "run", "q": "four"}})
viewer.answer("api/trajectory", {{"run": "run", "id": "2"}})
viewer.answer("api/tokens", {{"run": "run", "id": "2"}})
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def read_palettes() -> dict[str, dict[str, str]]:
    """Colours by name: light, dark by the system's choice, dark by the reader's."""
    css = (STATIC / "style.css").read_text()
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", css)
    light, *dark = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6}|var\(--\w+\));", block)) for block in blocks]
    return {"light": light, **{f"dark {at}": {**light, **own} for at, own in enumerate(dark)}}


def linear(palette: dict[str, str], name: str) -> list[float]:
    """Red, green and blue as light adds up."""
    value = palette[name]
    while value.startswith("var("):
        value = palette[value[6:-1]]
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(palette: dict[str, str], one: str, other: str) -> float:
    low, high = sorted(
        sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear(palette, name), strict=True))
        for name in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


SEEN = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""What an eye sees of linear red, green and blue: Machado, Oliveira and Fernandes 2009, severity 1."""


def seen_lab(palette: dict[str, str], name: str, seen: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIELAB of a colour as an eye of that kind sees it; distances in it are ΔE 1976."""
    light = linear(palette, name)
    r, g, b = (max(0.0, sum(a * part for a, part in zip(row, light, strict=True))) for row in seen)
    white = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047, 0.2126 * r + 0.7152 * g + 0.0722 * b
    xyz = (*white, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883)
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


INKS = {"s4": "mid-ink", "s5": "s5-ink", "n3": "mid-ink", "n4": "dark-ink", "p3": "mid-ink", "p4": "dark-ink"}


def test_text_can_be_read_and_colours_can_be_told_apart_in_light_and_dark():
    """WCAG AA for text on every class of token; a class that is coloured differs from the panel."""
    palettes = read_palettes()
    assert len(palettes) == 3 and palettes["dark 0"] == palettes["dark 1"]
    classes = [f"{kind}{at}" for kind, count in (("s", 5), ("n", 4), ("p", 4), ("v", 6)) for at in range(1, count + 1)]
    unreadable = {
        (name, shade): round(contrast(palette, INKS.get(shade, "ink"), shade), 2)
        for name, palette in palettes.items()
        for shade in classes
        if contrast(palette, INKS.get(shade, "ink"), shade) < 4.5
    }
    assert unreadable == {}
    for name, palette in palettes.items():
        for ink in ("ink", "soft", "faint"):
            assert contrast(palette, ink, "panel") >= 4.5 and contrast(palette, ink, "ground") >= 4.5, (name, ink)
        faint = [shade for shade in classes if contrast(palette, shade, "panel") < (1.15 if name == "light" else 1.4)]
        assert faint == [], name


def test_versions_and_runs_are_told_apart_by_every_eye():
    """Each two of a family, in light and dark, also by readers who do not see red, green or blue; ΔE of 10 or more."""
    close = {}
    for name, palette in read_palettes().items():
        for eye, seen in SEEN.items():
            for family in ("v", "c"):
                labs = {at: seen_lab(palette, f"{family}{at}", seen) for at in range(1, 7)}
                for one, other in itertools.combinations(labs, 2):
                    if (distance := math.dist(labs[one], labs[other])) < 10:
                        close[name, eye, f"{family}{one}", f"{family}{other}"] = round(distance, 1)
            for at in range(1, 5):
                assert math.dist(seen_lab(palette, f"n{at}", seen), seen_lab(palette, f"p{at}", seen)) > 25
    assert close == {}
    for name, palette in read_palettes().items():
        for at in range(1, 7):
            assert contrast(palette, f"c{at}", "ground") >= 3, (name, at)


def test_the_static_files_are_readable():
    """They are served as they are written: lines of 120 letters at most."""
    long = [
        f"{path.name}:{number}"
        for path in STATIC.iterdir()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 120
    ]
    assert long == []


def test_the_page_asks_about_the_curve_that_was_measured():
    root = Path(__file__).parents[2]
    measured = json.loads((root / "treadle/recipes/calculator/measured.json").read_text(encoding="utf-8"))
    curve = ", ".join(f"{value:.2f}" for _, value in measured["curves"]["validation/success"])
    assert f"Validation success goes {curve}." in (root / "docs/view.md").read_text(encoding="utf-8")
