import asyncio

import pytest

from tests.virtual_time import run
from treadle.observe import StallReport, StallWatchdog, Wait


class Waits:
    """Open waits that a test opens and closes, and the reports that come of them."""

    def __init__(self) -> None:
        self.open: list[Wait] = []
        self.reports: list[tuple[float, list[str]]] = []
        self.num_looks = 0

    def __call__(self) -> list[Wait]:
        self.num_looks += 1
        return self.open

    def report(self, report: StallReport) -> None:
        self.reports.append((round(report.now, 3), [wait.uid for wait in report.waits]))


def watch_for(seconds: float, waits: Waits, *events: tuple[float, Wait | str]) -> None:
    """Run a watch of 60 s in virtual time; at each event open a wait, or close the one of that uid."""

    async def play() -> None:
        for at, event in events:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            if isinstance(event, Wait):
                waits.open.append(event)
            else:
                waits.open = [wait for wait in waits.open if wait.uid != event]

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                group.create_task(StallWatchdog(60.0, waits, waits.report).run())
                await play()

    run(main())


def test_a_wait_is_reported_once_and_again_each_time_its_age_doubles() -> None:
    waits = Waits()
    watch_for(1000, waits, (0.0, Wait("a", 0, "generate", since=0.0)))
    assert [at for at, _ in waits.reports] == [60, 120, 240, 480, 960]


def test_a_wait_that_begins_later_is_reported_in_time() -> None:
    waits = Waits()
    watch_for(200, waits, (17.0, Wait("a", 0, "tool", since=17.0)))
    (first, _) = waits.reports[0]
    assert 77 <= first <= 77 + 6
    assert len(waits.reports) == 2


def test_a_wait_that_ends_in_time_is_not_reported() -> None:
    waits = Waits()
    watch_for(500, waits, (0.0, Wait("a", 0, "generate", since=0.0)), (59.0, "a"))
    assert waits.reports == []


def test_a_new_wait_of_the_same_session_starts_afresh() -> None:
    waits = Waits()
    again = Wait("a", 0, "generate", since=70.0)
    watch_for(131, waits, (0.0, Wait("a", 0, "generate", since=0.0)), (70.0, "a"), (70.0, again))
    assert [at for at, _ in waits.reports] == [60, 130]


def test_waits_that_come_due_together_share_a_report_oldest_first() -> None:
    waits = Waits()
    waits.open = [Wait("young", 0, "tool", since=0.02), Wait("old", 0, "tool", since=0.0)]
    watch_for(70, waits)
    assert waits.reports == [(60.0, ["old", "young"])]


def test_the_watch_sleeps_instead_of_polling() -> None:
    waits = Waits()
    watch_for(86_400, waits)
    assert waits.num_looks <= 86_400 / 60 + 1
    busy = Waits()
    busy.open = [Wait(f"task-{number}", 0, "generate", since=number / 100) for number in range(5000)]
    watch_for(119, busy)
    assert busy.num_looks <= 12
    assert sum(len(uids) for _, uids in busy.reports) == 5000


def test_a_report_names_uid_age_stage_server_and_last_event() -> None:
    wait = Wait("task-7", 3, "generate", since=10.0, server="replica-1", last_event="turn 2 began")
    report = StallReport(71.4, (wait,))
    assert report.text() == "waiting: task-7/3 for 61 s in generate on replica-1; last: turn 2 began"
    assert report.fields() == {
        "count": 1,
        "waits": [
            {
                "uid": "task-7",
                "sample": 3,
                "age_s": 61.4,
                "stage": "generate",
                "server": "replica-1",
                "last_event": "turn 2 began",
            }
        ],
    }


def test_a_thousand_stalled_waits_make_a_short_report() -> None:
    waits = tuple(Wait(f"task-{number}", 0, "generate", 0.0, f"replica-{number % 2}") for number in range(1000))
    lines = StallReport(60.0, waits).text().splitlines()
    assert len(lines) == 12
    assert lines[-1] in {"waiting: 495 more in generate on replica-0", "waiting: 495 more in generate on replica-1"}
    assert len(StallReport(60.0, waits).fields()["waits"]) == 100
