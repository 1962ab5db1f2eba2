"""docs/data.md tells the truth: its files load, its commands print what it shows, and verl's data are trained on."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

import treadle
from treadle.cli.main import main
from treadle.config import load
from treadle.data.file_formats import FORMATS
from treadle.data.tasks import load_training_tasks
from treadle.inspect.run_records import RunRecords

PAGE = (Path(treadle.__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:<!-- file: (\S+)[^\n]*-->\n)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = [text.removeprefix("$ ").partition("\n")[::2] for _, language, text in BLOCKS if language == "console"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The files of the page, and what its Python writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, language, text in BLOCKS:
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, "docs/data.md", "exec"), {"__name__": "page"})
    return tmp_path


def run(command: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    return int(ended.value.code or 0), out.getvalue()


def fits(shown: str, printed: str) -> bool:
    lines = ["(?:.*\n)*?" if line == "…" else f"{re.escape(line).replace('…', '.*')}\n" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[command for command, _ in CONSOLE])
def test_a_command_prints_what_the_page_shows(here, command, shown):
    status, printed = run(command)
    assert fits(shown, printed), printed
    assert status == (2 if "broken" in command or "prompt_length" in command else 0)


def test_the_same_rows_in_every_format_are_the_same_tasks(here):
    sets = []
    for name in ("tasks.jsonl", "tasks.json", "tasks.csv"):
        config = load("my.yaml", [f"data.train_files={name}", "data.shuffle=false"])
        sets.append([(task.messages, task.ground_truth) for task in load_training_tasks(config.data)])
    assert sets[0] == sets[1] == sets[2] and len(sets[0]) == 2


def test_the_page_names_every_format_and_loads_every_config(here):
    assert [suffix for suffix in FORMATS if suffix not in PAGE] == []
    for name, _, _ in BLOCKS:
        if name.endswith(".yaml"):
            load([Path("my.yaml"), Path(name)] if name != "my.yaml" else Path(name))


def test_three_of_four_draws_come_from_the_first_file(here):
    source = load_training_tasks(load([Path("my.yaml"), Path("mixture.yaml")]).data)
    drawn = [task.uid for task in source.take(40)]
    assert sum(uid.startswith(("tasks", "seven")) for uid in drawn) == 30


def test_the_sampler_of_the_page_trains_and_its_skipped_tasks_are_in_the_books(here):
    train = "treadle train my.yaml curriculum.yaml data.shuffle=false logging.run_dir=run reward.success_threshold=9"
    status, printed = run(f"{train} trainer.total_training_steps=1 checkpoint.save_freq=1")
    assert status == 0, printed
    status, printed = run(f"{train} trainer.total_training_steps=2")
    assert status == 0, printed
    status, printed = run("treadle audit run")
    assert status == 0 and "none lost" in printed, printed
    assert "sampler    easy_first.py:EasyFirst: 1 of 2 tasks drawn, 3 draws were repeats" in printed
    assert "skipped    1 tasks by the sampler" in printed
    status, printed = run("treadle replay run")
    assert status == 0, printed
    Path("easy_first.py").write_text(Path("easy_first.py").read_text() + "# other\n")
    status, printed = run(f"{train} trainer.total_training_steps=3")
    assert status == 2 and "source of easy_first.py:EasyFirst in data.sampler" in printed, printed
    status, printed = run(f"{train} data.sampler=success_band data.sampler_kwargs={{}} trainer.total_training_steps=3")
    assert status == 2 and "data.sampler: success_band now" in printed, printed


def test_data_and_reward_of_verl_train(here):
    status, printed = run("treadle train my.yaml verl.yaml logging.run_dir=run")
    assert status == 0, printed
    found = RunRecords(here / "run").select(1)
    assert {item.headline.data_source for item in found} == {"sums"} and len(found) == 4
    assert {item.ground_truth for item in found} == {"42", "15"}
    assert all(list(item.headline.reward.parts) == ["answer"] for item in found)
    assert {item.reward for item in found} <= {0.0, 1.0}
