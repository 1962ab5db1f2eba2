"""Tasks from a function of one's own: rows as in a file, errors that name the function and the row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.config.root import DataConfig
from treadle.data.tasks import load_tasks, load_training_tasks, load_validation_tasks
from treadle.errors import ConfigError
from treadle.types import Task

HERE = __name__
NUMBER = 3


def rows(count: int = 3, prompt: str = "hi") -> list[dict[str, Any]]:
    return [{"prompt": f"{prompt} {at}", "answer": at, "level": at} for at in range(count)]


def mixed() -> Iterator[Any]:
    yield Task("mine", ({"role": "user", "content": "x"},), 7)
    yield {"uid": "yours", "prompt": "y"}
    yield {"prompt": "z"}


def wrong() -> Iterator[Any]:
    yield {"prompt": "fine"}
    yield 17
    yield {"promt": "typo"}
    yield {"uid": "wrong:0", "prompt": "taken"}


def breaking(after: int = 2) -> Iterator[Any]:
    yield from rows(after)
    raise ZeroDivisionError("no more")


def nothing() -> list[Any]:
    return []


def text() -> str:
    return "one row"


def data(*names: str, **fields: Any) -> DataConfig:
    return DataConfig(train_files=tuple(f"{HERE}:{name}" for name in names), shuffle=False, **fields)


def test_rows_of_a_function_are_read_like_rows_of_a_file() -> None:
    tasks = load_training_tasks(data("rows")).take(3)
    assert tasks[1] == Task("rows:1", ({"role": "user", "content": "hi 1"},), 1, extra={"level": 1})
    assert [task.uid for task in tasks] == ["rows:0", "rows:1", "rows:2"]


def test_a_function_may_make_tasks() -> None:
    tasks = load_training_tasks(data("mixed")).take(3)
    assert [task.uid for task in tasks] == ["mine", "yours", "mixed:2"]
    assert tasks[0].ground_truth == 7


@pytest.mark.parametrize("name", ["rows", f"{HERE}:rows"])
def test_arguments_go_by_the_name_or_by_the_path(name: str) -> None:
    tasks = load_training_tasks(data("rows", source_kwargs={name: {"count": 2, "prompt": "ho"}}))
    assert len(tasks) == 2 and tasks.take(1)[0].messages[0]["content"] == "ho 0"


def test_only_as_many_rows_are_made_as_are_wanted() -> None:
    assert len(load_training_tasks(data("breaking", train_max_samples=2))) == 2


def test_functions_of_one_name_keep_their_paths_in_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_rows.py").write_text("def rows():\n    yield {'prompt': 'ho'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    tasks = load_tasks([f"{HERE}:rows", "other_rows:rows"], data("rows"), -1, validation=True)
    assert [task.uid for task in tasks] == [*(f"{HERE}:rows:{at}" for at in range(3)), "other_rows:rows:0"]


def test_a_file_comes_before_a_function_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{HERE}:rows.jsonl").write_text('{"prompt": "from a file"}\n')
    tasks = load_tasks([f"{HERE}:rows.jsonl"], DataConfig(), -1)
    assert tasks.take(1)[0].uid == f"{HERE}:rows.jsonl:1"


def test_every_wrong_row_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_tasks(data("wrong"))
    assert [mistake.key for mistake in caught.value.mistakes] == [f"{HERE}:wrong[{at}]" for at in (1, 2, 3)]
    problems = [mistake.problem for mistake in caught.value.mistakes]
    assert problems[0] == "a row must be a map with named fields, or a Task; it is int '17'"
    assert "no field 'prompt'; the row has promt" in problems[1]
    assert problems[2] == f"uid 'wrong:0' is already taken by {HERE}:wrong[0]"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("breaking", "breaking broke after 2 rows: ZeroDivisionError: no more"),
        ("nothing", "the function makes no rows"),
        ("text", "must return rows, one after another, it returned str 'one row'"),
        ("NUMBER", "is not a function: int"),
        ("row", f"{HERE} has no 'row'\n    did you mean 'rows'?"),
    ],
)
def test_a_function_that_makes_no_rows_is_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_tasks(data(name))
    assert words in str(caught.value) and HERE in str(caught.value)


def test_the_error_of_a_function_is_the_cause() -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_tasks(data("breaking"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.mistakes[0].key == "data.train_files"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"rows": {"cuont": 2}}, "unexpected keyword argument 'cuont'\n    it takes (count: int = 3, prompt"),
        ({"rows": 3}, "data.source_kwargs.rows: must be a map of arguments, got 3"),
        ({"row": {}}, "data.source_kwargs.row: no generator of this name"),
        ({"rows": {}, f"{HERE}:rows": {}}, "rows has arguments of its own there, too"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_tasks(data("rows", source_kwargs=kwargs))
    assert words in str(caught.value)


def test_a_dataset_of_reasoning_gym_is_no_function() -> None:
    config = DataConfig(train_files=("reasoning_gym:chain_sum",), source_kwargs={"reasoning_gym:chain_sum": {}})
    with pytest.raises(ConfigError, match="no generator of this name"):
        load_training_tasks(config)


@pytest.mark.parametrize("source", ["no.such.module:rows", "s3://bucket/rows.jsonl", "train.jsonl:17"])
def test_what_is_neither_file_nor_function_is_named(source: str) -> None:
    with pytest.raises(ConfigError, match=r"no module 'no'|no file") as caught:
        load_tasks([source], DataConfig(), -1)
    assert caught.value.mistakes[0].key == "data.train_files" and caught.value.mistakes[0].fix


def test_the_tasks_of_the_calculator_load() -> None:
    config = DataConfig(
        train_files=("treadle.recipes.calculator.tasks:train",),
        val_files=("treadle.recipes.calculator.tasks:validation",),
        source_kwargs={"train": {"count": 20}, "validation": {"count": 5, "seed": 3}},
    )
    training, validation = load_training_tasks(config), load_validation_tasks(config)
    assert (len(training), len(validation)) == (20, 5)
    assert not {task.uid for task in training} & {task.uid for task in validation}
