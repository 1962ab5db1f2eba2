"""The picture of a run: what the journal says of its time, and that it can be drawn and read at any length."""

import asyncio
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.schedules import Rollout, Trial, words_for
from treadle.errors import RunError
from treadle.inspect.timeline import TimelineReader, read_timeline, write_timeline
from treadle.inspect.timeline_svg import COLUMNS, Chart, draw_svg, format_duration
from treadle.journal import Journal, reader
from treadle.types import Outcome, StopReason, Timing, Trajectory

SVG = "{http://www.w3.org/2000/svg}"
NOON = 1_800_000_000.0


def write(directory: Path, *steps: tuple[int, list[list[Any]]], sessions: list[tuple[str, float, float]] = ()) -> None:
    """One start of a run: the spans of its steps, and when sessions were open, in seconds after noon."""
    with Journal.open(directory, max_mb=10) as journal:
        for step, spans in steps:
            moved = [[name, NOON + began, NOON + ended] for name, began, ended in spans]
            journal.add_event("spans", step=step, spans=moved)
        for at, (uid, began, ended) in enumerate(sessions):
            timing = Timing(NOON + began, ended - began)
            journal.add(Trajectory(uid, at, (), Outcome.ended(StopReason.STOP), timing=timing))


def shares(chart: Chart, lane: str, band: int = 0) -> list[float]:
    """A band, as the mean over each tenth of the time."""
    values = next(item for item in chart.lanes if item.name == lane).bands[band].values
    tenth = COLUMNS // 10
    return [round(sum(values[at : at + tenth]) / tenth, 3) for at in range(0, COLUMNS, tenth)]


def test_each_lane_shows_when_its_spans_were(tmp_path):
    spans = [["rollout", 0, 4], ["train", 4, 7], ["weights", 7, 8], ["checkpoint", 8, 9.5], ["validating", 8, 10]]
    write(tmp_path, (1, spans), sessions=[("a", 0, 4), ("b", 0, 2), ("validation-1/c", 8, 10)])
    chart = read_timeline(tmp_path)
    assert chart.seconds == pytest.approx(10)
    assert shares(chart, "trains") == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert shares(chart, "trainer waits") == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert shares(chart, "pushes weights") == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert shares(chart, "saves") == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0.5]
    assert shares(chart, "validates") == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert shares(chart, "open sessions") == pytest.approx([2, 2, 1, 1, 0, 0, 0, 0, 0, 0], abs=0.01)
    assert shares(chart, "open sessions", 1) == pytest.approx([0, 0, 0, 0, 0, 0, 0, 0, 1, 1], abs=0.01)
    assert shares(chart, "rollout waits") == pytest.approx([0, 0, 0, 0, 1, 1, 1, 1, 0, 0], abs=0.01)
    assert "30% training, 40% waits for samples" in chart.remarks[0]


def test_the_night_between_two_starts_is_left_out_and_what_was_made_again_is_counted(tmp_path):
    write(tmp_path, (1, [["train", 0, 2]]), (2, [["train", 2, 4]]))
    night = 12 * 3600
    write(tmp_path, (2, [["train", night, night + 6]]))
    chart = read_timeline(tmp_path)
    assert chart.seconds == pytest.approx(10)
    assert [(round(mark.column), mark.name) for mark in chart.starts] == [(400, "start 2")]
    assert [(round(mark.column), mark.name) for mark in chart.steps] == [(200, "1"), (400, "2"), (1000, "2")]
    assert "2 starts; 1 step made again after a crash" in chart.remarks
    assert chart.title.endswith("2 steps in 10 s")


def test_what_comes_after_the_last_step_is_drawn_and_is_no_step(tmp_path):
    write(tmp_path, (1, [["train", 0, 2]]), (1, [["validation", 2, 3], ["checkpoint", 3, 4]]))
    chart = read_timeline(tmp_path)
    assert chart.seconds == pytest.approx(4)
    assert len(chart.steps) == 1


def test_ten_thousand_steps_take_the_room_of_ten(tmp_path):
    spans = [(step, [["rollout", step, step + 0.4], ["train", step + 0.4, step + 0.9]]) for step in range(1, 10_001)]
    write(tmp_path / "many", *spans)
    write(tmp_path / "few", *spans[:10])
    many, few = draw_svg(read_timeline(tmp_path / "many")), draw_svg(read_timeline(tmp_path / "few"))
    assert len(many) < 100_000
    assert "10,000 steps" in many
    texts = [text.text for text in ElementTree.fromstring(many).iter(f"{SVG}text")]
    assert {"1000", "5000", "10000"} < set(texts), "round steps are named"
    assert len(texts) < len(list(ElementTree.fromstring(few).iter(f"{SVG}text"))) + 20


def test_the_picture_is_whole_and_names_its_lanes_whatever_the_run_is_called(tmp_path):
    directory = tmp_path / 'a <run> & "more"'
    write(directory, (1, [["train", 0, 2]]))
    path = write_timeline(directory)
    assert path == directory / "timeline.svg"
    picture = ElementTree.fromstring(path.read_text())
    texts = {text.text for text in picture.iter(f"{SVG}text")}
    assert {"trains", "trainer waits", "rollout waits", "pushes weights", "validates", "saves"} < texts
    assert 'a <run> & "more": 1 step in 2 s' in texts
    assert "prefers-color-scheme:dark" in path.read_text()


def test_a_long_run_is_drawn_from_its_newest_part_on(tmp_path, monkeypatch):
    """Nothing that was not read is drawn as idle; the last picture is the one that is read at once."""
    steps = [(step, [["train", 10 * step - 5, 10 * step]]) for step in range(1, 10)]
    sessions = [(f"t{at}", 10 * at, 10 * at + 5) for at in range(9)]
    write(tmp_path, *steps, sessions=sessions)
    monkeypatch.setattr(reader, "_MANY", 2)
    timeline = TimelineReader(tmp_path)
    first = timeline.read(0.0)
    assert timeline.share == pytest.approx(2 / 9)
    assert first.remarks[0] == "the newest 22% of the sessions; older ones are being read"
    assert first.seconds == pytest.approx(15)  # steps 8 and 9, and their sessions
    assert [mark.name for mark in first.steps] == ["8", "9"]
    write(tmp_path, sessions=[("new", 90, 95)])
    seen = [timeline.share]
    while timeline.share < 1:
        last = timeline.read(0.0)
        seen.append(timeline.share)
    assert seen == sorted(seen) and len(seen) == 5
    assert last == read_timeline(tmp_path)


def test_a_run_without_steps_has_no_timeline(tmp_path):
    write(tmp_path)
    with pytest.raises(RunError, match="no timeline"):
        read_timeline(tmp_path)


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_run_records_what_its_timeline_needs(tmp_path, mode):
    asyncio.run(Trial(tmp_path, Rollout(), *words_for(mode)).run_to_end())
    chart = read_timeline(tmp_path)
    used = {lane.name for lane in chart.lanes if any(any(band.values) for band in lane.bands)}
    assert {"trains", "trainer waits", "pushes weights", "saves"} <= used


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (7322, "2 h 2 min"), (90000, "1 d 1 h")]
)
def test_time_is_told_in_its_two_largest_units(seconds, told):
    assert format_duration(seconds) == told
