"""Fresh starts: what moves, what is copied over, what is refused, and when the earlier run gets its name back."""

from pathlib import Path

import pytest

from tests.sft_runs import run_sft, sft_config, sums
from treadle.config import Config, load, loads
from treadle.errors import ConfigError, Mistake, RunError
from treadle.journal import Journal, fresh_start
from treadle.journal.run_directory import RUN_FILE

TEXT = "model: {path: somewhere}\nlogging: {run_dir: run}\n"


@pytest.fixture(autouse=True)
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An earlier run, with inputs of its own."""
    monkeypatch.chdir(tmp_path)
    run_dir = Path("run")
    Journal.open(run_dir, max_mb=1, config_yaml="earlier: 1\n").close_blocking()
    (run_dir / "inputs").mkdir()
    for name in ("tasks.jsonl", "score.pkl", "score.py", "other.jsonl"):
        (run_dir / "inputs" / name).write_text(name)
    return run_dir


def config(*words: str) -> Config:
    return loads(TEXT, "my.yaml", words)


def begin(run_dir: Path) -> None:
    Journal.open(run_dir, max_mb=1).close_blocking()


def test_an_earlier_run_is_set_aside_under_the_first_free_name_and_that_is_said(earlier, capsys):
    Path("run.1").mkdir()
    with fresh_start(
        config("logging.project_name=run", "reward.functions.a={path: number_match, kwargs: {mode: run}}"), earlier
    ):
        assert not earlier.exists(), "a word that is no path is not taken for one"
        begin(earlier)
    assert "earlier" in Path("run.2/config.yaml").read_text()
    assert "the earlier run is in run.2 now" in capsys.readouterr().err


def test_inputs_that_the_config_names_are_copied_over_with_their_sources(earlier):
    words = ("data.train_files=[run/inputs/tasks.jsonl]", "reward.functions.it.path=run/inputs/score.pkl:score")
    with fresh_start(config(*words), earlier):
        begin(earlier)
    assert {path.name for path in (earlier / "inputs").iterdir()} == {"tasks.jsonl", "score.pkl", "score.py"}
    assert Path("run.1/inputs/other.jsonl").exists()


def test_the_file_that_the_config_was_read_from_is_copied_over(earlier):
    (earlier / "train.yaml").write_text(f"{TEXT}data: {{train_files: [run/inputs/tasks.jsonl]}}\n")
    with fresh_start(load("run/train.yaml"), earlier):
        begin(earlier)
    assert load("run/train.yaml").data.train_files == ("run/inputs/tasks.jsonl",)


def test_a_model_or_trajectories_of_the_directory_are_refused_and_nothing_moves(earlier):
    (earlier / "checkpoints" / "0001-step-1").mkdir(parents=True)
    words = ("model.path=run/checkpoints/0001-step-1", f"data.val_files=[{earlier.absolute()}]")
    with pytest.raises(ConfigError) as refused, fresh_start(config(*words), earlier):
        raise AssertionError("it must not begin")
    assert {mistake.key for mistake in refused.value.mistakes} == {"model.path", "data.val_files"}
    assert "rename run yourself" in str(refused.value)
    assert (earlier / RUN_FILE).exists() and not Path("run.1").exists()


@pytest.mark.parametrize(
    "error", [ConfigError([Mistake("a", "b")]), RunError("no"), KeyboardInterrupt()], ids=lambda it: type(it).__name__
)
def test_a_run_that_does_not_begin_gives_the_directory_back(earlier, capsys, error):
    with pytest.raises(type(error)), fresh_start(config(), earlier):
        (earlier / "inputs").mkdir(parents=True)
        (earlier / "inputs" / "new.jsonl").write_text("new")
        raise error
    assert (earlier / "inputs" / "tasks.jsonl").exists() and not (earlier / "inputs" / "new.jsonl").exists()
    assert not Path("run.1").exists()
    assert "the earlier one is in run again" in capsys.readouterr().err


def test_a_run_that_began_and_failed_keeps_its_directory(earlier):
    with pytest.raises(RunError), fresh_start(config(), earlier):
        begin(earlier)
        raise RunError("a step failed")
    assert (earlier / RUN_FILE).exists() and (Path("run.1") / RUN_FILE).exists()


def test_a_live_run_is_not_set_aside(earlier):
    live = Journal.open(earlier, max_mb=1)
    with pytest.raises(RunError, match="in use by pid"), fresh_start(config(), earlier):
        raise AssertionError("it must not begin")
    live.close_blocking()
    assert not Path("run.1").exists()


def test_fine_tuning_that_is_refused_for_its_rows_moves_nothing(tmp_path):
    run_sft(sft_config(tmp_path, "trainer.total_training_steps=1"))
    before = (tmp_path / "run" / RUN_FILE).read_text()
    wrong = sft_config(tmp_path, rows=[{"question": "1+1="}, *sums(3)])
    with pytest.raises(ConfigError, match="row"):
        run_sft(wrong, fresh=True)
    assert (tmp_path / "run" / RUN_FILE).read_text() == before
    assert not (tmp_path / "run.1").exists()
