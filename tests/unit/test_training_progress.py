"""What a person sees of a training run."""

import io
import threading

import pytest

from docs.live_picture import draw
from tests.view_runs import write_run
from treadle.observe.step_metrics import Spans, add_up
from treadle.observe.training_progress import TrainingView, draw_curve

METRICS = {"reward/mean": 0.25, "rollout/tokens_per_s": 1234.5, "seconds/rollout": 1.5, "seconds/train": 0.5}


def test_without_a_terminal_every_step_is_one_line():
    stream = io.StringIO()
    with TrainingView(10, stream=stream) as view:
        view.on_validation(0, 0.5)
        view.on_step(1, METRICS)
    assert stream.getvalue().splitlines() == [
        "validation after step 0: success 0.500",
        "step 1/10: reward 0.250, 1,234 tokens/s, rollout 1.50 s, train 0.50 s",
    ]


def test_a_validation_that_was_waited_for_is_told_once_and_few_truncated_are_not_none():
    stream = io.StringIO()
    with TrainingView(10, stream=stream) as view:
        seconds = {"seconds/validating": 2.0, "seconds/validation": 2.1}
        view.on_step(1, {**METRICS, **seconds, "rollout/truncated": 0.001})
        view.on_step(2, {**METRICS, "seconds/validating": 2.0})
    first, second = stream.getvalue().splitlines()
    assert "under 1% truncated" in first
    assert "validation 2.10 s" in first and "validating" not in first
    assert "validating 2.00 s" in second, "it ran beside the step"


def test_the_number_of_steps_comes_from_the_run():
    """So that the command need not read the tasks to know it."""
    stream = io.StringIO()
    with TrainingView(stream=stream) as view:
        view.begin(10)
        view.on_step(1, METRICS)
    assert stream.getvalue().startswith("step 1/10: ")


def test_without_a_terminal_a_run_that_says_nothing_is_seen_to_live():
    class Heard(io.StringIO):
        heard = threading.Event()

        def write(self, text: str) -> int:
            written = super().write(text)
            if "rollout, no news" in self.getvalue():
                self.heard.set()
            return written

    stream = Heard()
    with TrainingView(10, stream=stream, heartbeat_s=0.01) as view:
        view.watch(lambda: "rollout")
        assert stream.heard.wait(30)
    assert "after step 0 of 10: rollout, no news for " in stream.getvalue()


def test_on_a_terminal_the_view_is_drawn_with_curve_success_and_seconds():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with TrainingView(10, stream=stream) as view:
        view.watch(lambda: "rollout")
        view.on_validation(0, 0.35)
        view.on_step(1, METRICS)
    shown = stream.getvalue()
    assert "1 of 10   rollout" in shown
    assert "0.35 (step 0)" in shown
    assert "1,234 tokens/s" in shown
    assert "rollout 1.50  train 0.50" in shown


def test_the_picture_of_the_view_is_drawn_from_what_a_run_recorded(tmp_path):
    """`docs/live_picture.py` makes docs/live.svg of the README."""
    drawn = draw(write_run(tmp_path), 2, "treadle train mine").replace("&#160;", " ")
    for words in ("treadle train mine", "2 of 2   rollout", "0.500", "0.00 (step 0)  1.00 (step 2)", "train 1.00"):
        assert words in drawn, words
    assert "@font-face" not in drawn, "nothing is fetched from elsewhere"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_view_leaves_steps_to_the_log(terminal, caplog):
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    with caplog.at_level("INFO"), TrainingView(10, stream=stream, heartbeat_s=0.0, quiet=True) as view:
        view.on_step(1, METRICS)
    assert stream.getvalue() == ""
    assert "step 1/10: reward 0.250" in caplog.text


def test_a_curve_spans_its_own_range_and_keeps_the_last_values():
    assert draw_curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert draw_curve([0.7]) == "▁"
    assert len(draw_curve([float(at) for at in range(500)], width=60)) == 60


def test_spans_add_up_nest_and_start_anew():
    now = iter(range(100))
    spans = Spans(clock=lambda: float(next(now)))
    with spans("outer"):
        assert spans.current == "outer"
        with spans("inner"):
            assert spans.current == "inner"
    with spans("inner"):
        pass
    taken = spans.take()
    assert add_up(taken) == {"outer": 3.0, "inner": 2.0}
    assert [name for name, _, _ in taken] == ["inner", "outer", "inner"]
    assert spans.take() == ()
    assert spans.current == ""
