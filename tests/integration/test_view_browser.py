"""The viewer in a real browser: every screen, by keyboard alone, live, with hostile text, and its exports offline."""

import json
import os
import re
import runpy
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self
from urllib.parse import quote

import pytest

from tests.browser import CHROMIUM, Browser, is_demanded
from tests.view_runs import CONFIG, annotated, made, sampled, trained, write_run
from treadle.errors import ToolFailure
from treadle.journal import Journal
from treadle.journal.run_directory import CONFIG_FILE, RUN_FILE
from treadle.types import Outcome, Row, Score, StopReason, Task, Timing, ToolCall, ToolResult, Turn
from treadle.view import run_pages
from treadle.view import server as view_server
from treadle.view.run_pages import RunPages
from treadle.view.server import ViewedRun, ViewerServer

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not is_demanded(os.environ), reason="no chromium on this machine: apt-get install chromium"
)

HOSTILE = (
    "<script>alert('script')</script>",
    "<img src=x onerror=\"alert('img')\">",
    "<svg/onload=alert('svg')><animate onbegin=alert(1) attributeName=x dur=1s>",
    '"><iframe srcdoc="<script>parent.alert(\'frame\')</script>"></iframe>',
    "' onmouseover='alert(1)' style='position:fixed;inset:0' autofocus onfocus='alert(2)' x='",
    "javascript:alert('href')",
    "<style>*{display:none!important}</style><link rel=stylesheet href=//evil.example/x.css>",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)} `;alert(1)//",
    "</textarea></title></pre></template><base href=//evil.example><meta http-equiv=refresh content='0;url=//evil'>",
    "\x1b]0;owned\x07\x1b[2J\x9b31m\r\b\x00",
    "\u202egnp.exe\u2066hidden\u2069\u200b\ufeff",
)
"""Script, attribute, SVG, frame, CSS, template, ANSI and direction tricks."""


class Serving:
    """A viewer at work in a thread."""

    def __init__(self, runs: dict[str, Path]) -> None:
        self.server = ViewerServer(runs)
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def opened(tmp_path: Path, browser: Browser) -> Iterator[tuple[Browser, Path]]:
    """A browser at a run of three steps, and its directory."""
    run_dir = write_run(tmp_path / "run", made("c", 0, 1.0, "os._exit(0)"), made("c", 1, 1.0, "x"))
    serving = Serving({"run": run_dir})
    browser.console.clear()
    browser.requests.clear()
    with serving:
        browser.open(serving.server.url)
        browser.wait("location.hash === '#/run/run' && document.getElementById('main').dataset.shown === '#/run/run'")
        yield browser, run_dir
        browser.open("about:blank")


SCREENS = {
    "/run/run": "How sessions ended",
    "/run/run/steps": "Steps",
    "/run/run/step/1": "1 group",
    "/run/run/validation/0": "Validation after step 0",
    "/run/run/tasks": "Tasks",
    "/run/run/group?uid=a": "ground truth",
    "/run/run/t/3/transcript": "question of a",
    "/run/run/t/3/tokens": "colour by",
    "/run/run/t/3/tokens?as=table": "sampler logprob",
    "/run/run/t/3/tokens?row=1&by=version": "row 1 (fork)",
    "/run/run/t/4/tree": "in step 2",
    "/run/run/t/3/time": "Open for 2.0 s",
    "/run/run/t/3/tree": "forked from row 0 after 3 tokens",
    "/run/run/t/6/transcript": "the tool broke",
    "/run/run/diff?id=2&other=3": "then they part",
    "/run/run/diff?id=3": "Choose what to compare it with",
    "/run/run/diff?id=3&row=1&other=1&from=responses": "Their responses",
    "/run/run/findings": "groups without signal",
    "/run/run/find?q=three": "a/0",
    "/run/run/config": "model.path",
}


def test_a_gate_demands_the_browser():
    assert is_demanded({"CI": "true"}) and is_demanded({"CI": "1"})
    assert not is_demanded({}) and not is_demanded({"CI": ""}) and not is_demanded({"CI": "false"})


def test_every_screen_shows_what_it_is_for(opened):
    browser, _ = opened
    for address, told in SCREENS.items():
        browser.go(address)
        assert told in browser.text(), address
    missing = [line for line in browser.console if "422" not in line]  # this run has no timeline yet
    assert missing == []


def test_what_a_run_recorded_of_turns_tokens_and_steps_is_drawn(opened):
    """When a turn began, tokens that text would change, and the same task at another step, ready to be compared."""
    browser, run_dir = opened
    row = sampled((69, 67, 78, 69, 9, 8))  # "calc" letter by letter, where the vocabulary has "cal"
    later = replace(row, turns=(replace(row.turns[0], started_s=0.125),))
    echoes = {"gateway": {"echoes": {"edited": 1}}}
    with Journal.open(run_dir, max_mb=50) as journal:
        trained(journal, 4, made("a@1", 0, 1.0, rows=(later,), extra=echoes))
    browser.go("/run/run/group?uid=a")
    assert "The same task at other steps" in browser.text() and "step 4 (compare)" in browser.text()
    browser.go("/run/run/find?echo=edited")
    assert "a@1/0" in browser.text() and "b/0" not in browser.text()
    last = browser.evaluate("document.querySelector('main tbody a').hash.split('/')[4]")
    browser.go(f"/run/run/t/{last}/time")
    assert "Each turn is drawn when it was asked for." in browser.text() and "125 ms" in browser.text()
    browser.go("/run/run/t/2/time")
    assert "this journal has their lengths" in browser.text()
    browser.go(f"/run/run/t/{last}/tokens")
    assert (
        browser.evaluate("[...document.querySelectorAll('.tok.drift')].map(tok => tok.textContent).join('')") == "cal"
    )
    browser.go(f"/run/run/t/{last}/tokens?as=table")
    cells = browser.evaluate(
        "[...document.querySelectorAll('tbody tr')].slice(0, 4).map(row => "
        "[...row.cells].slice(3, 6).map(cell => cell.innerText))"
    )
    assert [row[0] + "|" + row[2] for row in cells] == [
        *("c|cal", "a|part of the one above", "l|part of the one above", "c|the same"),
    ]
    assert cells[0][1] not in ("69", "67", "78") and cells[3][1] == "69"
    browser.go(f"/run/run/t/{last}/tokens")
    assert "3 sampled tokens of this window (dotted) would be other tokens" in browser.text()


def test_weight_updates_are_drawn_into_the_time_of_a_session(opened):
    browser, run_dir = opened
    timing = Timing(time.time() - 30, 60.0, 40.0, 0.25, 0.05, 0.2)
    with Journal.open(run_dir, max_mb=50) as journal:
        journal.add(replace(made("pushed", 0, 1.0), timing=timing))
        journal.add_event("weights", version=4, num_bytes=1, seconds=0.1)
        journal.add_event("weights", version=5, num_bytes=1, seconds=0.1)
    browser.go("/run/run/find?uid=pushed")
    last = browser.evaluate("document.querySelector('main tbody a').hash.split('/')[4]")
    browser.go(f"/run/run/t/{last}/time")
    assert "2 weight updates while it was open (drawn in): versions 4, 5." in browser.text()
    drawn = browser.evaluate("[...document.querySelectorAll('.lane .update')].map(m => [m.title, m.style.left])")
    assert len(drawn) == 8  # two in each of four lanes
    assert [title for title, _ in drawn[:2]] == ["new weights: version 4", "new weights: version 5"]
    assert all(40 < float(left.removesuffix("%")) < 100 for _, left in drawn)
    browser.go("/run/run/t/2/time")
    assert "No weights were pushed while it was open." in browser.text()


def test_configs_of_two_runs_are_compared(browser, tmp_path):
    runs = {name: write_run(tmp_path / name) for name in ("one", "two")}
    path = runs["two"] / CONFIG_FILE
    path.write_text(path.read_text().replace("n: 4", "n: 8") + "trainer:\n  mode: sync  # given\n", encoding="utf-8")
    serving = Serving(runs)
    rows = "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].slice(0, 3).map(c => c.innerText))"
    try:
        browser.open(serving.server.url)
        browser.go("/run/one/config")
        browser.evaluate(
            "[...document.querySelectorAll('main a')].find(a => /compare with two/.test(a.innerText)).click()"
        )
        browser.wait("document.getElementById('main').dataset.shown === '#/run/one/config?other=two'")
        assert browser.evaluate(rows) == [["rollout.n", "4", "8"], ["trainer.mode", "(not set)", "sync"]]
        browser.go("/run/one/config?other=two&all=yes")
        assert ["model.path", *(["treadle/tiny-calculator"] * 2)] in browser.evaluate(rows)
    finally:
        browser.open("about:blank")
        serving.close()


def test_a_key_turns_light_to_dark_and_back(opened):
    """And it is kept for the next visit."""
    browser, _ = opened
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(ground)
    try:
        browser.press("t")
        dark = browser.evaluate(ground)
        assert dark != light and browser.evaluate("document.documentElement.dataset.theme") == "dark"
        browser.reload()
        assert browser.evaluate(ground) == dark
        browser.press("t")
        assert browser.evaluate(ground) == light
    finally:
        browser.evaluate("localStorage.clear()")


NAMED = ("button", "link", "textbox", "searchbox", "combobox", "image", "img", "switch", "checkbox", "dialog")


def test_a_screen_reader_has_a_name_for_everything_on_every_screen(opened):
    browser, _ = opened
    nameless = []
    for address in SCREENS:
        browser.go(address)
        roles = 0
        for node in browser.accessibility():
            role = node.get("role", {}).get("value", "").lower()
            roles += role in NAMED
            if role in NAMED and not node.get("ignored") and not node.get("name", {}).get("value", "").strip():
                nameless.append((address, role, node.get("backendDOMNodeId")))
        assert roles > 5, address
    assert nameless == []


SHIFTED = """new Promise((done) => {
  const sum = (list) => list.getEntries().reduce((all, e) => all + (e.startTime > window.since ? e.value : 0), 0);
  new PerformanceObserver((list) => done(sum(list))).observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(0), 500);
})"""
"""The browser's own measure of content that jumped since `window.since`."""


def test_nothing_moves_while_a_run_is_live(opened):
    """Over three updates of each screen; the list of steps while it is read: its newest step comes in at its top."""
    browser, run_dir = opened
    step, moved = 3, {}
    with Journal.open(run_dir, max_mb=50) as journal:
        for address in ("/run/run", "/run/run/group?uid=a&step=1", "/run/run/findings", "/run/run/steps"):
            while address.endswith("steps") and step < 60:
                step += 1
                trained(journal, step, made(f"n{step}", 0, 0.5))
            journal.flush_blocking()
            browser.go(address)
            wait_for_pulse(browser)
            browser.evaluate("scrollTo(0, 300)")
            browser.evaluate(
                "new Promise((shown) => setTimeout(shown, 300)).then(() => window.since = performance.now())"
            )
            for _ in range(3):
                step += 1
                trained(journal, step, made(f"n{step}", 0, 0.5), made(f"n{step}", 1, 1.0))
                journal.flush_blocking()
                wait_for_pulse(browser)
            moved[address] = browser.evaluate(SHIFTED)
    assert str(step) in browser.text()
    assert all(shift < 0.01 for shift in moved.values()), moved
    browser.evaluate("scrollTo(0, 0); window.since = performance.now()")
    for jump in range(60):  # what jumps is measured
        browser.evaluate(f"document.body.style.paddingTop = '{300 * (jump % 2 == 0)}px'")
        if browser.evaluate(SHIFTED) > 0.01:
            break
    else:
        raise AssertionError("a page that jumped was not measured")
    browser.evaluate("document.body.style.paddingTop = ''")


def test_nothing_is_asked_of_any_other_machine(opened):
    browser, _ = opened
    for address in SCREENS:
        browser.go(address)
    foreign = [url for url in browser.requests if not url.startswith(("http://127.0.0.1:", "data:", "about:"))]
    assert foreign == []


def test_a_run_is_walked_by_keyboard_alone(opened):
    browser, _ = opened
    opened_url = browser.evaluate("location.href.split('#')[0]")
    at = lambda address: browser.wait(f"document.getElementById('main').dataset.shown === '#{address}'")  # noqa: E731
    browser.press("g", "s")
    at("/run/run/steps")
    browser.press("j", "j", "j", "Enter")
    at("/run/run/step/1")
    browser.press("j", "Enter")
    at("/run/run/group?uid=a&step=1")
    browser.press("d")
    at("/run/run/diff?id=2&other=3")
    browser.press("u")
    at("/run/run/group?uid=a&step=1")
    browser.press("u")
    at("/run/run/step/1")
    browser.press("[")  # there is none before the first
    browser.press("]")
    at("/run/run/step/2")
    browser.go("/run/run/step/3")
    browser.press("]")  # nor after the last
    browser.press("u")
    at("/run/run/steps")
    browser.go("/run/run/group?uid=validation-2/v")
    browser.press("u")
    at("/run/run/validation/2")
    browser.go("/run/run/t/2/transcript")
    browser.press("2")
    at("/run/run/t/2/tokens")
    browser.press("c")
    at("/run/run/t/2/tokens?by=version")
    browser.press("]")
    at("/run/run/t/3/tokens?by=version")
    browser.press("ArrowRight", "ArrowRight")
    assert "position" in browser.evaluate("document.querySelector('.side').innerText")
    at("/run/run/t/3/tokens?by=version&tok=1")
    browser.open("about:blank")
    browser.open(opened_url + "#/run/run/t/3/tokens?by=version&tok=4")
    browser.wait("document.querySelector('.tok.on')")
    assert browser.evaluate("document.querySelector('.tok.on').dataset.at") == "4"
    browser.press("u")
    at("/run/run/group?uid=a&step=1")
    browser.press("/")
    at("/run/run/find")
    browser.press("/")
    assert browser.evaluate("document.activeElement.name") == "q"
    browser.press("Escape")
    browser.press("?")
    assert browser.evaluate("document.getElementById('help').open")
    browser.press("Escape")


def test_the_skip_link_leads_to_the_content_of_the_screen(opened):
    browser, _ = opened
    browser.go("/run/run/steps")
    browser.evaluate("document.querySelector('.skip').focus()")
    browser.press("Enter")
    browser.wait("document.activeElement.id === 'main'")
    assert browser.evaluate("[location.hash, document.getElementById('main').dataset.shown]") == ["#/run/run/steps"] * 2
    assert "Steps" in browser.text()


def test_any_two_rows_are_compared_by_keyboard_alone(opened):
    """Marked on one screen, compared on another: a fork with a validation, a found line, a finding, and by choice."""
    browser, _ = opened
    at = lambda address: browser.wait(f"document.getElementById('main').dataset.shown === '#{address}'")  # noqa: E731
    browser.go("/run/run/t/3/tree")
    browser.press("j", "j", "m")
    assert "Marked: a/1, row 1" in browser.evaluate("document.getElementById('marked').innerText")
    browser.go("/run/run/validation/2")
    browser.press("j", "d")
    at("/run/run/diff?id=3&row=1&other=7")
    assert "a/1, row 1" in browser.text() and "validation after step 2" in browser.text()
    browser.press("x")
    at("/run/run/diff?id=7&other=3&other_row=1")
    browser.press("[")
    at("/run/run/diff?id=7&other=2")
    browser.go("/run/run/find?q=three")
    browser.press("j", "d")
    at("/run/run/diff?id=3&row=1&other=2")
    browser.go("/run/run/findings")
    browser.press("j", "d")
    browser.wait("location.hash.startsWith('#/run/run/diff?id=3&row=1&other=')")
    browser.go("/run/run/t/3/tokens?row=1")
    browser.press("m")
    assert browser.evaluate("document.getElementById('marked').hidden")
    browser.press("D")
    at("/run/run/diff?id=3&row=1")
    assert "Its other rows" in browser.text() and "Other samples of the task" in browser.text()
    browser.press("j", "Enter")
    at("/run/run/diff?id=3&row=1&other=3")
    assert "differ" in browser.text() or "part" in browser.text()


def test_sampler_and_trainer_are_read_for_any_row(opened):
    browser, _ = opened
    at = lambda address: browser.wait(f"document.getElementById('main').dataset.shown === '#{address}'")  # noqa: E731
    browser.go("/run/run/t/3/tokens")
    browser.press("v")
    at("/run/run/t/3/tokens?as=table")
    browser.press("r")
    at("/run/run/t/3/tokens?row=1&as=table")
    assert "treadle annotate" in browser.text()
    browser.press("r")
    at("/run/run/t/3/tokens?as=table")
    browser.press("v")
    at("/run/run/t/3/tokens")
    browser.go("/run/run/t/1/tokens?as=table")
    assert "A validation is not trained on" in browser.text() and "treadle annotate" not in browser.text()


def test_how_a_trajectory_is_looked_at_is_kept(opened):
    """Row, colours and form from one tab to the next; colours and form from one sample to the next."""
    browser, _ = opened
    at = lambda address: browser.wait(f"document.getElementById('main').dataset.shown === '#{address}'")  # noqa: E731
    browser.go("/run/run/t/3/tokens?row=1&by=version&as=table")
    browser.press("1")
    at("/run/run/t/3/transcript?row=1&by=version&as=table")
    browser.press("4")
    at("/run/run/t/3/tree?row=1&by=version&as=table")
    browser.press("2")
    at("/run/run/t/3/tokens?row=1&by=version&as=table")
    browser.press("[")
    at("/run/run/t/2/tokens?by=version&as=table")
    browser.press("]")
    at("/run/run/t/3/tokens?by=version&as=table")


def test_a_live_run_is_followed_without_a_jump(opened):
    """The chosen row stays chosen and in place while a step comes in above it."""
    browser, run_dir = opened
    browser.go("/run/run/steps")
    browser.press("j")
    with Journal.open(run_dir, max_mb=50) as journal:
        trained(journal, 4, made("new", 0, 0.5), made("new", 1, 1.0))
        journal.flush_blocking()
        browser.wait("document.querySelector('tbody tr td').innerText === '4'")
        browser.wait("document.getElementById('live').innerText === 'live'")
    assert browser.evaluate("document.querySelector('tr.at td').innerText") == "3"
    assert browser.evaluate("document.activeElement.innerText") == "3"
    assert browser.evaluate("scrollY") == 0


def test_a_long_step_of_a_live_run_can_be_read(opened):
    """A step in force never changes: what others write leaves its rows, the scroll position and a selection alone."""
    browser, run_dir = opened
    with Journal.open(run_dir, max_mb=50) as journal:
        trained(journal, 4, *[made(f"g{at:03}", 0, 1.0) for at in range(100)])
        journal.flush_blocking()
        browser.go("/run/run/step/4")
        for rows in (80, 100):
            browser.evaluate("scrollTo(0, document.body.scrollHeight)")
            browser.wait(f"document.querySelectorAll('tbody tr').length >= {rows}")
        browser.evaluate("scrollTo(0, document.body.scrollHeight)")
        browser.evaluate(
            "getSelection().selectAllChildren(document.querySelector('tbody:last-child tr:last-child .soft'))"
        )
        before = browser.evaluate("[scrollY, String(getSelection())]")
        assert before[0] > 1000 and before[1] == "question of g099"
        trained(journal, 5, made("other", 0, 1.0))
        journal.flush_blocking()
        wait_for_pulse(browser)
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 100
        assert browser.evaluate("[scrollY, String(getSelection())]") == before


def test_a_list_goes_on_for_a_reader_who_is_faster_than_it(opened):
    """At its end again before the browser has drawn the page that came."""
    browser, run_dir = opened
    with Journal.open(run_dir, max_mb=50) as journal:
        trained(journal, 4, *[made(f"g{at:03}", 0, 1.0) for at in range(160)])
    browser.go("/run/run/step/4")
    browser.evaluate(
        "(async () => { const end = () => scrollTo(0, document.body.scrollHeight), frame = () =>"
        " new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(shown))); end(); await frame();"
        " await document.querySelector('[data-more]').load(); end(); })()"
    )
    browser.wait("document.querySelectorAll('tbody').length >= 3")


def wait_for_pulse(browser: Browser) -> None:
    """Until the page has asked twice whether anything changed, and has shown what did."""
    browser.evaluate("window.asked = performance.getEntriesByType('resource').filter(e => /pulse/.test(e.name)).length")
    browser.wait(
        "performance.getEntriesByType('resource').filter(e => /pulse/.test(e.name)).length > window.asked + 1"
        " && !document.querySelector('[aria-busy]')"
    )


def test_the_run_screen_follows_in_place(opened):
    """Curves and the timeline come anew; nodes that stay are the same, and a curve under the pointer is read on."""
    browser, run_dir = opened
    browser.evaluate("scrollTo(0, 40); window.kept = document.querySelector('main h1'); window.was = scrollY")
    browser.evaluate(
        "(() => { const box = document.querySelector('.chart svg').getBoundingClientRect(); document.querySelector("
        "'.chart svg').dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 8, bubbles: true})) })()"
    )
    assert "step 3:" in browser.evaluate("document.querySelector('.chart h3').innerText")
    bars = "[...document.querySelectorAll('.bars .track i')].map(bar => bar.style.width)"
    before = browser.evaluate(bars)
    browser.requests.clear()
    with Journal.open(run_dir, max_mb=50) as journal:
        for sample in range(6):
            journal.add(made("bad", sample, None, outcome=Outcome.failed(ToolFailure("it broke again"))))
        trained(journal, 4, made("new", 0, 0.5))
        journal.flush_blocking()
        browser.wait("/step 4:/.test(document.querySelector('.chart h3').innerText)")
        wait_for_pulse(browser)
    assert browser.evaluate("window.kept === document.querySelector('main h1') && scrollY === window.was")
    browser.wait("performance.getEntriesByType('resource').some(e => /timeline.*at=\\d/.test(e.name))")
    live = browser.evaluate(bars)
    assert not any("Content Security Policy" in line for line in browser.console)
    browser.reload()
    browser.wait("document.querySelector('.bars') && !document.querySelector('[aria-busy]')")
    assert live == browser.evaluate(bars) != before


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end of the test at the latest: no answer of the viewer waits for it any longer."""
    gate = threading.Event()
    yield gate
    gate.set()


def hold(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, gate: threading.Event) -> threading.Event:
    """Make answers of a page wait for `gate`; the event says that one waits."""
    real, waits = getattr(owner, name), threading.Event()

    def held(*given):
        waits.set()
        gate.wait(300)
        return real(*given)

    monkeypatch.setattr(owner, name, held)
    return waits


def test_a_run_is_shown_before_its_sessions_are_counted(opened, gate, monkeypatch):
    """Facts and curves stand while how sessions ended, and where the time goes, are still to come."""
    browser, _ = opened
    browser.go("/run/run/steps")
    held = [hold(monkeypatch, RunPages, name, gate) for name in ("ends", "waits")]
    browser.go("/run/run")
    assert all(waits.wait(90) for waits in held)
    assert browser.evaluate("document.querySelectorAll('.chart').length") > 0
    assert "trajectories" in browser.text() and "Counting them…" in browser.text()
    gate.set()
    browser.wait("!document.querySelector('[aria-busy]')")
    assert "stop" in browser.evaluate("document.getElementById('ends').innerText")
    assert "training" in browser.evaluate("document.getElementById('waits').innerText")


def test_the_sessions_of_a_run_that_has_ended_are_counted_to_the_end(opened, monkeypatch):
    """An answer counts a part of them; the page asks on although nothing of the run changes."""
    browser, _ = opened
    browser.go("/run/run/steps")
    monkeypatch.setattr(run_pages, "COUNTED", 2)
    with Serving({"run": opened[1]}) as serving:
        browser.open(serving.server.url)
        browser.wait("/How sessions ended/.test(document.getElementById('ends').innerText)")
        browser.wait("!/counted so far|Counting/.test(document.getElementById('ends').innerText)")
        bars = browser.evaluate("[...document.querySelectorAll('#ends .bars .num')].map(bar => bar.innerText)")
        assert bars == ["8", "1", "1"]  # stopped, failed; at the tool
        browser.open("about:blank")


def test_a_screen_that_was_left_asks_for_nothing_more(opened, gate, monkeypatch):
    """Findings that come when another screen is shown are not a reason to draw that one anew."""
    browser, _ = opened
    monkeypatch.setattr(view_server, "SCAN_S", 0.0)
    waits = hold(monkeypatch, ViewedRun, "findings", gate)
    browser.evaluate("location.hash = '/run/run/findings'")
    assert waits.wait(90)
    browser.go("/run/run/config")
    gate.set()
    browser.wait("performance.getEntriesByType('resource').some(e => /findings/.test(e.name) && e.responseEnd)")
    wait_for_pulse(browser)
    asked = "performance.getEntriesByType('resource').filter(e => /api\\/config/.test(e.name)).length"
    assert browser.evaluate(asked) == 1


def test_a_list_of_a_live_run_stays_and_offers_what_is_new(opened):
    browser, run_dir = opened
    browser.go("/run/run/tasks")
    rows = browser.evaluate("document.querySelectorAll('tbody tr').length")
    with Journal.open(run_dir, max_mb=50) as journal:
        journal.add(made("zz", 0, 1.0))
        journal.flush_blocking()
        browser.wait("!document.getElementById('fresh').hidden")
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == rows
        browser.press(".")
        browser.wait(f"document.querySelectorAll('tbody tr').length === {rows + 1}")
    assert browser.evaluate("document.getElementById('fresh').hidden")


def test_curves_lead_to_steps_and_runs_are_laid_over_each_other(browser, tmp_path):
    runs = {name: write_run(tmp_path / name, made("c", 0, 1.0)) for name in ("one", "two", "three")}
    serving = Serving(runs)
    shown = "[...document.querySelectorAll('[role=switch]')].map(a => a.innerText + ' ' + a.ariaChecked)"
    try:
        browser.open(serving.server.url)
        browser.go("/run/one")
        assert browser.evaluate(shown) == ["two true", "three true"]
        browser.evaluate("document.querySelector('[role=switch]').click()")
        browser.wait("/with=three/.test(document.getElementById('main').dataset.shown)")
        assert browser.evaluate(shown) == ["two false", "three true"]
        assert browser.evaluate("document.querySelectorAll('.chart')[0].querySelectorAll('.curve').length") == 2
        browser.evaluate("document.querySelector('.chart').focus()")
        browser.press("ArrowLeft", "ArrowLeft", "Enter")
        browser.wait("document.getElementById('main').dataset.shown === '#/run/one/step/2'")
    finally:
        browser.open("about:blank")
        serving.close()


def test_rows_beside_the_main_one_are_read_in_the_transcript(opened):
    browser, run_dir = opened
    agent = sampled((60, 61, 62, 63), prompt=(5, 6, 90, 91))
    with Journal.open(run_dir, max_mb=50) as journal:
        trained(journal, 4, made("agents", 0, 1.0, rows=(sampled((21, 30, 31, 9, 8)), agent)))
    browser.go("/run/run/find?uid=agents")
    last = browser.evaluate("document.querySelector('main tbody a').hash.split('/')[4]")
    browser.go(f"/run/run/t/{last}/tree")
    assert "a beginning of its own" in browser.text() and "forked" not in browser.text()
    browser.go(f"/run/run/t/{last}/transcript")
    assert 'calls calculate {"expression":"1+1"}' in browser.text()
    browser.evaluate("document.querySelector('.rowtext summary').click()")
    browser.wait("document.querySelectorAll('.rowtext .message').length === 3")
    assert browser.evaluate("[...document.querySelectorAll('.rowtext .role')].map(n => n.innerText)") == [
        *("prompt", "sampled", "given"),
    ]


def test_turns_belong_to_the_last_messages_of_a_transcript(opened):
    """Reward, seconds and calls of a turn stand at what the model said, not at an example of its prompt."""
    browser, run_dir = opened
    row = sampled((21, 30, 31, 9, 8))
    row = replace(row, turns=(replace(row.turns[0], reward=0.5),))
    example = ({"role": "user", "content": "how?"}, {"role": "assistant", "content": "an example"})
    item = made("shots", 0, 1.0, rows=(row,))
    with Journal.open(run_dir, max_mb=50) as journal:
        journal.add(replace(item, messages=(*example, *item.messages)))
    browser.go("/run/run/find?uid=shots")
    last = browser.evaluate("document.querySelector('main tbody a').hash.split('/')[4]")
    browser.go(f"/run/run/t/{last}/transcript")
    shown = "[...document.querySelectorAll('.message.assistant')].map(n => /reward 0.5/.test(n.innerText))"
    assert browser.evaluate(shown) == [False, True]
    calls = "[...document.querySelectorAll('.message.assistant')].map(n => n.querySelectorAll('.call').length)"
    assert browser.evaluate(calls) == [0, 1]


def test_a_run_of_supervised_fine_tuning_shows_its_loss(browser, tmp_path):
    run_dir = tmp_path / "run"
    with Journal.open(run_dir, max_mb=50, config_yaml=CONFIG) as journal:
        for step in (1, 2):
            journal.add_event("step", step=step, version=step, groups=[], positions=[])
            journal.add_metrics(step, {"sft/loss": 2.0 / step, "seconds/train": 1.0})
    serving = Serving({"run": run_dir})
    try:
        browser.open(serving.server.url)
        browser.go("/run/run")
        assert "sft/loss" in browser.text()
        browser.go("/run/run/steps")
        heads = browser.evaluate("[...document.querySelectorAll('th')].map(head => head.innerText)")
        assert heads == ["step", "loss", "train"]
        browser.go("/run/run/step/1")
        assert "supervised fine-tuning" in browser.text()
    finally:
        browser.open("about:blank")
        serving.close()


def test_a_search_shows_its_words_and_leads_to_them(opened):
    browser, run_dir = opened
    item = made("said", 0, 1.0, "x" * 25_000 + "\nthe answer is #### 42")
    with Journal.open(run_dir, max_mb=50) as journal:
        journal.add(item)
        trained(journal, 4, made("gap", 0, 1.0))
        journal.add_annotations([annotated(made("gap", 0, 1.0), (0.0, -0.25, -2.5, -0.75, -1.0), step=4)])
    browser.go("/run/run/find")
    browser.press("/")
    browser.evaluate("document.activeElement.value = '#### 42'")
    browser.press("Enter")
    browser.wait("document.querySelector('.hit mark')")
    assert browser.evaluate("document.querySelector('.hit').innerText").endswith("the answer is #### 42")
    browser.evaluate("document.activeElement.blur()")
    browser.press("j", "Enter")
    browser.wait("document.querySelector('main .message mark')")
    assert browser.evaluate("document.querySelector('main .message mark').innerText") == "####"
    browser.go("/run/run/find?order=gap")
    assert "−2.0000" in browser.text()
    browser.press("j", "Enter")
    browser.wait("document.querySelector('.tok.marked')")
    assert browser.evaluate("document.querySelector('.tok.marked').dataset.at") == "5"
    assert "by=gap" in browser.evaluate("location.hash")


def test_a_finding_leads_to_what_it_is_about(browser, tmp_path):
    """The letters that were matched are marked: in a call, behind emoji, behind the cut of a long text; and tokens."""
    call = {"function": {"name": "bash", "arguments": "cd x && rm -rf tests"}}
    texts = {
        "call": {"content": "I look.", "tool_calls": [call]},
        "emoji": {"content": "🎉" * 30 + " then os._exit(0)"},
        "long": {"content": "x" * 30_000 + " os._exit(0)"},
        "loop": {"content": "again"},
    }
    samples = [
        replace(made(uid, 0, 1.0), messages=({"role": "user", "content": "do"}, {"role": "assistant", **fields}))
        for uid, fields in texts.items()
    ]
    loop = (*range(100, 120), *((7, 8, 9) * 30), 1, 2)
    samples[-1] = replace(samples[-1], rows=(sampled(loop),))
    serving = Serving({"run": write_run(tmp_path / "run", *samples)})
    try:
        browser.open(serving.server.url)
        found = {}
        for uid in texts:
            browser.go("/run/run/findings")
            browser.wait(f"[...document.querySelectorAll('.finding a')].some(a => a.innerText === '{uid}/0')")
            browser.evaluate(
                f"[...document.querySelectorAll('.finding a')].find(a => a.innerText === '{uid}/0').click()"
            )
            browser.wait("document.querySelector('main mark, main .tok.marked')")
            found[uid] = browser.evaluate("document.querySelector('main mark')?.innerText")
            top = browser.evaluate("document.querySelector('main mark, main .tok.marked').getBoundingClientRect().top")
            assert 0 < top < 900, uid
        assert found == {"call": "rm -rf tests", "emoji": "os._exit(", "long": "os._exit(", "loop": None}
        assert browser.evaluate("document.querySelectorAll('.tok.marked').length") == 90
        assert browser.evaluate("document.querySelector('.tok.marked').dataset.at") == "23"
    finally:
        browser.open("about:blank")
        serving.close()


def hostile_run(run_dir: Path) -> Path:
    """Every text that a run can hold is hostile."""
    with Journal.open(run_dir, max_mb=50, config_yaml=CONFIG) as journal:
        journal.add_event("resume", step=0, position=0, open=[])
        for step, text in enumerate(HOSTILE, start=1):
            uid = f"{step} {text}"
            turn = Turn(0, 3, 5, StopReason.STOP, (ToolCall(text, {text: text}),), (ToolResult(text),), replica=text)
            row = Row((5, 6), (20, 21, 22, 23, 24), (1, 1, 1, 0, 0), (-0.1,) * 5, (0, 0, 0, -1, -1), (turn,))
            messages = (
                {"role": "system", "content": text},
                {"role": "user", "content": text, "name": text},
                {
                    "role": "assistant",
                    "content": text,
                    "reasoning_content": text,
                    "tool_calls": [{"name": text, "arguments": text}],
                },
                {"role": "tool", "content": text, "name": text},
                {"role": text, "content": [{"type": "text", "text": text}]},
            )
            journal.add_task(Task(uid, messages[:2], ground_truth=text, data_source=text, extra={text: text}))
            good = made(uid, 0, 1.0, rows=(row, row), parts={text: 1.0, "answer": 1.0}, data_source=text)
            good = replace(good, messages=messages, reward=Score(1.0, {text: 1.0}, {text: text}), extra={text: text})
            failed = made(uid, 1, None, text, outcome=Outcome.failed(ToolFailure(text)), data_source=text)
            trained(journal, step, good, failed)
            journal.add_event("stall", stage=text, uid=uid)
            journal.add_metrics(step, {f"reward/part/{text}": 1.0})
    return run_dir


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Iterator[str]:
    serving = Serving({"run": hostile_run(tmp_path_factory.mktemp("hostile") / "run")})
    yield serving.server.url
    serving.close()


def assert_harmless(browser: Browser, where: str) -> None:
    assert browser.dialogs == [], where
    found = browser.evaluate(
        "[...document.querySelectorAll('script, iframe, object, embed, base, meta, link, style, svg animate, img, "
        "[onload], [onerror], [onclick], [onmouseover], [onfocus], [srcdoc]')].map(n => n.outerHTML)"
    )
    ours = [
        node
        for node in found
        if not node.startswith(('<script src="app.js"', "<meta ", "<link rel=", '<img class="timeline"'))
    ]
    assert ours == [], where
    assert all("127.0.0.1" in url or url.startswith(("data:", "about:")) for url in browser.requests), where
    odd = browser.evaluate(
        "[...document.querySelectorAll('a')].map(a => a.getAttribute('href')).filter(h => !/^(#|api\\/)/.test(h))"
    )
    assert odd == [], where
    shown = browser.evaluate("document.body.innerText")
    assert not any(letter in shown for letter in "\x1b\x00\x9b\u202e\u2066\u200b"), where


def test_hostile_text_in_every_field_stays_text(hostile, browser):
    browser.dialogs.clear()
    browser.requests.clear()
    browser.open(hostile)
    browser.wait("document.getElementById('main').dataset.shown === '#/run/run'")
    assert_harmless(browser, "run")
    for screen in ("steps", "tasks", "findings", "find", "find?q=alert", "config", "config?all=yes"):
        browser.go(f"/run/run/{screen}")
        assert_harmless(browser, screen)
    for text in HOSTILE:
        browser.evaluate(f"location.hash = '/run/run?m=' + encodeURIComponent({json.dumps(f'reward/part/{text}')})")
        browser.wait("document.querySelectorAll('.chart').length === 1 && /m=/.test(main.dataset.shown)")
        assert_harmless(browser, f"metric: {text}")
        assert browser.evaluate("document.querySelector('.chart svg').getAttribute('aria-label')").isprintable()
    for step, text in enumerate(HOSTILE, start=1):
        good = 2 * step - 1
        for screen in (
            f"step/{step}",
            f"t/{good}/transcript",
            f"t/{good}/tokens",
            f"t/{good}/tokens?as=table",
            f"t/{good}/time",
            f"t/{good}/tree",
            f"t/{good + 1}/transcript",
            f"diff?id={good}&other={good + 1}",
            f"diff?id={good}",
        ):
            browser.go(f"/run/run/{screen}")
            assert_harmless(browser, f"{screen}: {text}")
        browser.press("m")
        assert f"Marked: {step} " in browser.evaluate("document.getElementById('marked').innerText")
        assert_harmless(browser, f"marked: {text}")
        browser.press("m")
        browser.evaluate(f"location.hash = '/run/run/group?uid=' + encodeURIComponent({json.dumps(f'{step} {text}')})")
        browser.wait("document.querySelector('.samples') || document.querySelector('.problem')")
        assert_harmless(browser, f"group: {text}")
        browser.evaluate(
            "document.querySelectorAll('.tok, [data-href], a, button').forEach("
            "n => n.dispatchEvent(new PointerEvent('pointerover', {bubbles: true})))"
        )
        assert_harmless(browser, f"hovered: {text}")
    browser.go("/run/run/t/1/transcript")
    assert HOSTILE[0] in browser.text()


def hostile_names(folder: Path) -> dict[str, Path]:
    """Runs whose name, directory, config and cause of failure are hostile, by name."""
    runs = {}
    for number, text in enumerate(HOSTILE):
        runs[text] = write_run(folder / f"{number} {text.replace('/', '|').replace(chr(0), '')}")
        config = f"model:\n  path: {text}  # {text}\n  {text}: {text}  # set by {text}\n"
        (runs[text] / CONFIG_FILE).write_text(config, encoding="utf-8")
        (runs[text] / RUN_FILE).write_text(json.dumps({"status": "failed", "cause": text}), encoding="utf-8")
    return runs


def test_hostile_names_directories_configs_and_causes_stay_text(browser, tmp_path):
    runs = hostile_names(tmp_path)
    serving = Serving(runs)
    browser.dialogs.clear()
    browser.requests.clear()
    try:
        browser.open(serving.server.url)
        browser.wait("document.querySelectorAll('tbody tr').length === 11")
        assert_harmless(browser, "runs")
        assert HOSTILE[0] in browser.text()
        for name, other in zip(runs, [*list(runs)[1:], HOSTILE[0]], strict=True):
            there = quote(other, safe="")
            for screen in (
                *("", "/t/3/transcript", "/t/3/tokens?as=table", "/diff?id=3", "/config", "/config?all=yes"),
                *(f"/config?other={there}", f"/config?other={there}&all=yes", f"/diff?id=3&other=2&other_run={there}"),
            ):
                browser.go(f"/run/{quote(name, safe='')}{screen}")
                assert_harmless(browser, f"{screen}: {name}")
            browser.press("m")
            assert_harmless(browser, f"marked: {name}")
        browser.evaluate("sessionStorage.clear()")
    finally:
        browser.open("about:blank")
        serving.close()


@pytest.mark.parametrize(
    "fragment",
    [
        "#/run/<img src=x onerror=alert(1)>",
        "#/run/run/<script>",
        "#/x/%E0%A4%A",
        "#/run/run/t/NaN/tokens?by=<b>&start=x&row='",
        "#/run/run/group?uid=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E",
    ],
)
def test_a_hostile_address_stays_text(hostile, browser, fragment):
    browser.dialogs.clear()
    browser.open("about:blank")
    browser.open(hostile + fragment)
    browser.evaluate("new Promise(r => setTimeout(r, 500))")
    assert_harmless(browser, fragment)


@pytest.mark.parametrize("fragment", ["#/run/%zz", "#/run/run/%E0%A4%A/x", "#/x/%"])
def test_an_address_that_cannot_be_read_is_a_sentence(opened, fragment):
    """Also the first one of a page, which goes on watching the run and leads elsewhere."""
    browser, _ = opened
    start = browser.evaluate("location.href.split('#')[0]")
    browser.open("about:blank")
    browser.console.clear()
    browser.open(start + fragment)
    browser.wait("document.querySelector('main .problem')")
    assert "this address cannot be read at %" in browser.text()
    browser.wait("performance.getEntriesByType('resource').some(e => /pulse/.test(e.name))")
    browser.go("/run/run/steps")
    assert "Steps" in browser.text() and browser.console == []


def test_an_exported_page_opens_without_a_server_and_runs_nothing(hostile, browser, tmp_path):
    browser.open(hostile)
    browser.dialogs.clear()
    pages = {
        step: browser.evaluate(f"fetch('api/export?run=run&id={2 * step - 1}').then(r => r.text())")
        for step in (1, 4, 7, 10)
    }
    for step, page in pages.items():
        file = tmp_path / f"{step}.html"
        file.write_text(page, encoding="utf-8")
        browser.requests.clear()
        browser.open(file.as_uri())
        assert browser.dialogs == []
        assert browser.evaluate("document.querySelectorAll('script, img, iframe, svg').length") == 0
        assert browser.evaluate("document.querySelectorAll('.tokens > span').length") == 14
        shown = browser.evaluate("document.body.innerText")
        assert not any(letter in shown for letter in "\x1b\x00\x9b\u202e\u2066\u200b"), step
        assert [url for url in browser.requests if not url.startswith("file:")] == []


def test_a_hundred_thousand_tokens_and_ten_thousand_groups_are_usable(tmp_path, browser):
    run_dir = tmp_path / "run"
    with Journal.open(run_dir, max_mb=500, config_yaml=CONFIG) as journal:
        journal.add(made("long", 0, 1.0, rows=(sampled(tuple(at % 300 for at in range(100_000))),)))
        many = [made(f"task-{at:05}", 0, 1.0) for at in range(10_000)]
        for at in range(0, len(many), 1000):
            for item in many[at : at + 1000]:
                journal.add(item)
            journal.flush_blocking(120)
    serving = Serving({"run": run_dir})
    try:
        browser.open(serving.server.url)
        browser.go("/run/run/t/1/tokens?start=50000")
        assert browser.evaluate("document.querySelectorAll('.tok').length") == 1500
        browser.go("/run/run/tasks")
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 40
        scroll_through_pages(browser, 40)
        assert browser.evaluate("document.querySelectorAll('*').length") < 10_000  # 40 pages whole: 21,000
        assert browser.evaluate("document.querySelectorAll('tr.gap').length") > 20
        assert browser.evaluate("document.querySelector('table').offsetHeight") > 40 * 1000
        browser.evaluate("scrollTo(0, 0)")
        browser.wait("document.querySelector('tbody td')?.innerText === 'long'")
        walk_over_pages(browser)
    finally:
        browser.open("about:blank")
        serving.close()


def scroll_through_pages(browser: Browser, pages: int) -> None:
    """To the end of a list, until it has that many pages; what is left far behind is dropped."""
    browser.evaluate(
        "(async () => { const list = document.querySelector('main table');"
        " const more = document.querySelector('[data-more]');"
        f" while (list.tBodies.length < {pages}) {{ scrollTo(0, document.body.scrollHeight); await more.load();"
        " await new Promise((shown) => requestAnimationFrame(() => setTimeout(shown))); } })()"
    )


def walk_over_pages(browser: Browser) -> None:
    """`j` over the end of a page: a step changes two lines and searches no list, however long; `k` goes back."""
    browser.evaluate(
        "(() => { window.searches = 0; window.changed = []; const search = document.querySelectorAll.bind(document);"
        " document.querySelectorAll = (what) => { window.searches += 1; return search(what); };"
        " new MutationObserver((found) => window.changed.push(...found.map((one) => one.target.tagName)))"
        ".observe(document.querySelector('main'), {attributes: true, subtree: true, attributeFilter: ['class']}) })()"
    )
    browser.press(*"j" * 45)
    browser.wait("document.querySelector('tr.at td').innerText === 'task-00043'")
    assert browser.evaluate("window.searches") == 0
    assert browser.evaluate("window.changed.length") <= 2 * 45 and browser.evaluate(
        "window.changed.every(n => n === 'TR')"
    )
    browser.press(*"k" * 10)
    browser.wait("document.querySelector('tr.at td').innerText === 'task-00033'")
    browser.evaluate("scrollTo(0, document.body.scrollHeight)")
    browser.wait("document.querySelectorAll('tr.gap').length > 20")
    assert browser.evaluate("document.querySelector('tr.at td').innerText") == "task-00033"  # its page stays


def test_the_pictures_of_the_docs_are_made(tmp_path):
    """By the script of the page, here from small runs: each screen it names is there and is drawn."""
    stale = write_run(tmp_path / "stale", made("gap", 0, 1.0))
    with Journal.open(stale, max_mb=50) as journal:
        journal.add_annotations([annotated(made("gap", 0, 1.0), (0.0, -0.25, -2.5, -0.75, -1.0), step=3)])
    gamed = write_run(tmp_path / "gamed", made("c", 0, 0.5, parts={"format": 0.5, "answer": 0.0}))
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "view_screenshots.py"))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    script["main"]([str(write_run(tmp_path / "success")), str(gamed), str(stale), "--output", str(pictures)])
    made_of = {path.stem.removeprefix("view-") for path in pictures.iterdir()}
    page = (Path(__file__).parents[2] / "docs" / "view.md").read_text(encoding="utf-8")
    assert made_of == set(re.findall(r"view-(\w+)\.png", page))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())
