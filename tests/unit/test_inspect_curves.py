"""Metrics as curves: chosen by name, on common axes, as text, SVG and PNG."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from treadle.cli.main import main
from treadle.errors import ConfigError, RunError
from treadle.inspect.curves import MetricPanel, draw_svg, draw_text, format_value, read_panels, write_picture
from treadle.journal import Journal

SVG = "{http://www.w3.org/2000/svg}"


def write(run_dir: Path, **curves: list[float]) -> Path:
    with Journal.open(run_dir, max_mb=10) as journal:
        for name, values in curves.items():
            for step, value in enumerate(values, start=1):
                journal.add_metrics(step, {name.replace("__", "/"): value})
    return run_dir


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_the_metrics_that_tell_whether_a_run_learns_come_first(tmp_path):
    run_dir = write(tmp_path / "run", zzz=[1, 2], reward__mean=[0.5, 0.6], validation__success=[0.1, 0.9])
    assert [panel.name for panel in read_panels([run_dir])] == ["validation/success", "reward/mean"]
    assert [panel.name for panel in read_panels([run_dir], ["z*", "reward/mean"])] == ["zzz", "reward/mean"]


def test_several_runs_share_their_axes(tmp_path):
    one, other = write(tmp_path / "one", loss=[3, 2, 1]), write(tmp_path / "other", loss=[9, 8])
    (panel,) = read_panels([one, other], ["loss"])
    assert (panel.steps, panel.range) == ((1, 3), (1.0, 9.0))
    text = draw_text(panel)
    assert "one: 3 → 1 at step 3" in text and "other: 9 → 8 at step 2" in text


def test_a_curve_that_rises_is_drawn_from_the_lower_left_to_the_upper_right():
    panel = MetricPanel("up", {"run": [(step, float(step)) for step in range(11)]}, (0, 10), (0.0, 10.0))
    lines = [line.partition("│")[2] for line in draw_text(panel, 40).splitlines() if "│" in line]
    firsts = [len(line) - len(line.lstrip()) for line in lines]
    assert firsts == sorted(firsts, reverse=True) and firsts[-1] == 0
    assert len(lines[0]) > len(lines[-1])
    assert all(len(line) <= 40 for line in draw_text(panel, 40).splitlines())


def test_a_metric_that_never_changes_takes_one_line_and_numbers_that_are_not_finite_are_counted(tmp_path):
    run_dir = write(
        tmp_path / "run", flat=[2, 2, 2], broken=[1.0, float("nan"), 3.0, float("inf")], never=[float("nan")]
    )
    flat, broken = read_panels([run_dir], ["flat", "broken", "never"])
    assert draw_text(flat).splitlines()[1].strip() == "2 at every step"
    assert draw_text(broken).startswith("broken (2 values are not finite, and are left out)\n")
    assert broken.curves["run"] == [(1, 1.0), (3, 3.0)]


def test_an_unknown_metric_is_refused_with_the_nearest(tmp_path):
    run_dir = write(tmp_path / "run", reward__mean=[1])
    with pytest.raises(ConfigError, match="did you mean 'reward/mean'"):
        read_panels([run_dir], ["reward/maen"])
    with pytest.raises(RunError, match="no metrics are recorded"):
        read_panels([write(tmp_path / "empty")])


def test_the_svg_is_whole_whatever_runs_and_metrics_are_called(tmp_path):
    runs = [write(tmp_path / name, **{'a<b>&"': [1, 2, 3]}) for name in ('one <&">', "two")]
    root = ElementTree.fromstring(draw_svg(read_panels(runs, ["*"])))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert 'one <&">' in texts and 'a<b>&"' in texts
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(lines) == 2 and len({line.get("stroke") for line in lines}) == 2
    assert all(len(line.get("points", "").split()) == 3 for line in lines)


def test_the_command_writes_a_picture_by_the_ending_of_its_name(tmp_path, capsys):
    run_dir = write(tmp_path / "run", reward__mean=[1, 2], **{"cost_in_$": [1, 3]})
    assert command("metrics", run_dir, "--metric", "*", "--output", tmp_path / "new" / "curves.png") == 0
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert command("metrics", run_dir, "--output", tmp_path / "curves.svg") == 0
    assert (tmp_path / "curves.svg").read_text().startswith("<svg")
    assert command("metrics", run_dir, "--output", tmp_path / "curves.pdf") == 2
    assert "must end in .svg or .png" in capsys.readouterr().err


def test_a_png_without_matplotlib_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    panels = read_panels([write(tmp_path / "run", loss=[1, 2])])
    with pytest.raises(ConfigError, match=r"pip install 'treadle\[plot\]'.*\.svg"):
        write_picture(panels, tmp_path / "curves.png")


def test_the_command_lists_and_gives_json(tmp_path, capsys):
    run_dir = write(tmp_path / "run", reward__mean=[0.5, 0.75], loss=[2, 1])
    assert command("metrics", run_dir, "--list") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["loss", "2", "→", "1", "step", "2"],
        ["reward/mean", "0.500", "→", "0.750", "step", "2"],
    ]
    assert command("metrics", run_dir, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": {"loss": [[1, 2], [2, 1]], "reward/mean": [[1, 0.5], [2, 0.75]]}
    }
    assert command("metrics", run_dir) == 0
    assert "reward/mean\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (2e-7, "2.0e-07"),
        (-3.5, "-3.50"),
        (4.0, "4"),
    ],
)
def test_numbers_are_short(value, told):
    assert format_value(value) == told
