"""Task sources: each task once an epoch, from wherever a run stopped; and where tasks come from."""

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym  # noqa: F401  a second, which belongs to no test
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import loads
from treadle.config.root import DataConfig
from treadle.data.task_source import SourceState, TaskSource, share_draws
from treadle.data.tasks import load_tasks, load_training_tasks, load_validation_tasks
from treadle.errors import ConfigError
from treadle.types import Task


def make_source(count: int, *, shuffle: bool = True, seed: int = 42) -> TaskSource:
    return TaskSource([Task(f"t{at}", ()) for at in range(count)], shuffle=shuffle, seed=seed)


def uids(tasks: Any) -> list[str]:
    return [task.uid for task in tasks]


def write_lines(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


STEPS = st.lists(st.one_of(st.integers(0, 7), st.sampled_from(["iterate", "save", "crash"])), max_size=30)


@given(count=st.integers(1, 6), shuffle=st.booleans(), seed=st.integers(0, 3), steps=STEPS)
def test_every_epoch_hands_out_every_task_once(count: int, shuffle: bool, seed: int, steps: list[Any]) -> None:
    source = make_source(count, shuffle=shuffle, seed=seed)
    handed: list[str] = []
    saved, kept = source.state(), 0
    for step in steps:
        if step == "save":
            saved, kept = source.state(), len(handed)
        elif step == "crash":
            source, handed = make_source(count, shuffle=shuffle, seed=seed), handed[:kept]
            source.restore(SourceState(**asdict(saved)))
        else:
            handed += uids(source if step == "iterate" else source.take(step))
        assert source.position == len(handed)
    handed += uids(source)
    assert len(handed) % count == 0
    for start in range(0, len(handed), count):
        assert Counter(handed[start : start + count]) == Counter(f"t{at}" for at in range(count))


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    first, again, other = make_source(50), make_source(50), make_source(50, seed=1)
    epochs = [uids(first), uids(first)]
    assert epochs == [uids(again), uids(again)]
    assert epochs[0] != epochs[1] != uids(other)
    assert uids(make_source(6).take(6)) == ["t2", "t5", "t0", "t3", "t4", "t1"]


def test_without_shuffling_the_order_is_that_of_the_files() -> None:
    assert uids(make_source(3, shuffle=False).take(7)) == ["t0", "t1", "t2", "t0", "t1", "t2", "t0"]


def test_iteration_ends_with_the_epoch_and_goes_on_from_the_position() -> None:
    source = make_source(5)
    head = source.take(2)
    assert len(head + tuple(source)) == 5 and source.epoch == 1
    assert len(uids(source)) == 5 and source.epoch == 2


def test_a_state_taken_inside_an_iteration_skips_and_repeats_nothing() -> None:
    source, resumed = make_source(5), make_source(5)
    seen = []
    for task in source:
        seen.append(task.uid)
        if len(seen) == 3:
            resumed.restore(source.state())
            break
    assert sorted(seen + uids(resumed)) == ["t0", "t1", "t2", "t3", "t4"]


def test_a_state_of_other_tasks_is_refused() -> None:
    state = make_source(5).state()
    with pytest.raises(ConfigError, match="started with 5 tasks, these are 6"):
        make_source(6).restore(state)
    renamed = TaskSource([Task(f"other{at}", ()) for at in range(5)], shuffle=True, seed=42)
    with pytest.raises(ConfigError, match="started with 5 other tasks"):
        renamed.restore(state)
    with pytest.raises(ConfigError) as caught:
        make_source(5, shuffle=False, seed=7).restore(state)
    assert [mistake.key for mistake in caught.value.mistakes] == ["data.shuffle", "data.seed"]


def test_tasks_are_loaded_from_files_in_order(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", '{"prompt": "one"}', '{"prompt": "two", "uid": "mine"}')
    second = write_lines(tmp_path / "b.jsonl", '{"prompt": "three"}')
    data = DataConfig(train_files=(first, second), val_files=(second,), train_max_samples=2)
    assert uids(load_tasks(data.train_files, data, -1, validation=True)) == ["a.jsonl:1", "mine", "b.jsonl:1"]
    assert len(load_training_tasks(data)) == 2
    assert uids(load_validation_tasks(data)) == ["b.jsonl:1"]


def test_validation_is_never_shuffled(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *(f'{{"prompt": "{at}"}}' for at in range(20)))
    data = DataConfig(train_files=(file,), val_files=(file,))
    assert uids(load_validation_tasks(data)) == [f"a.jsonl:{at}" for at in range(1, 21)]
    assert uids(load_training_tasks(data)) != [f"a.jsonl:{at}" for at in range(1, 21)]


def test_files_of_the_same_name_keep_their_paths_in_ids(tmp_path: Path) -> None:
    files = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        files.append(write_lines(tmp_path / folder / "train.jsonl", '{"prompt": "hi"}'))
    assert sorted(uids(load_tasks(files, DataConfig(), -1))) == [f"{file}:1" for file in files]


def test_a_uid_that_appears_twice_names_both_places(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl", '{"prompt": "x", "uid": 7}', '{"prompt": "y"}', '{"prompt": "z", "uid": "7"}'
    )
    with pytest.raises(ConfigError, match=r"uid '7' is already taken by .*a\.jsonl:1") as caught:
        load_tasks([file], DataConfig(), -1)
    assert caught.value.mistakes[0].key == f"{file}:3"
    with pytest.raises(ConfigError, match=r"a\.jsonl:2' is already taken"):
        load_tasks([write_lines(tmp_path / "a.jsonl", "{}", '{"prompt": "y"}'), file], DataConfig(), -1)


@pytest.mark.parametrize(
    ("lines", "line", "problem"),
    [
        (['{"prompt": "x"}', "", '{"prompt": "x"}'], 2, "the line is blank"),
        (['{"prompt": "x"}', '{"prompt": }'], 2, "not JSON: Expecting value at column 12"),
        (['["prompt"]'], 1, "must hold an object with named fields, it holds a list"),
        (["[" * 100_000], 1, "nested too deeply"),
        (['{"prompt": ' + "9" * 5000 + "}"], 1, "a whole number has more than 4,300 digits"),
        (['{"question": "x", "id": 1}'], 1, "no field 'prompt'; the row has question, id"),
        (["{}"], 1, "no field 'prompt'; the row has no fields at all"),
    ],
)
def test_a_bad_line_is_named(lines: list[str], line: int, problem: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ConfigError) as caught:
        load_tasks([file], DataConfig(), -1)
    (mistake,) = caught.value.mistakes
    assert mistake.key == f"{file}:{line}" and problem in mistake.problem


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the line is not UTF-8: .* at byte 13"):
        load_tasks([str(tmp_path / "a.jsonl")], DataConfig(), -1)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}'
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    tasks = load_tasks([str(tmp_path / "a.jsonl")], DataConfig(shuffle=False), -1).take(2)
    assert [task.messages[0]["content"] for task in tasks] == ["a\u2028b\x85c", "d"]


def test_all_mistakes_come_in_one_report_of_bounded_length(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *["{}"] * 100)
    with pytest.raises(ConfigError, match="gave up reading after 20 mistakes") as caught:
        load_tasks([file], DataConfig(), -1)
    assert [mistake.key for mistake in caught.value.mistakes[:20]] == [f"{file}:{at}" for at in range(1, 21)]


def test_rows_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", '{"prompt": "x"}', "not JSON")
    assert len(load_tasks([file], DataConfig(), 1)) == 1


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl: the file holds no rows"):
        load_tasks([write_lines(tmp_path / "a.jsonl")], DataConfig(), -1)


@pytest.mark.parametrize(
    ("files", "limit", "words"),
    [
        ([], -1, "data.val_files: no task files"),
        (["/no/such.jsonl"], -1, "data.val_files: no file '/no/such.jsonl'"),
        (["/no/such.jsonl"], 0, "data.val_max_samples: 0 tasks asked for"),
        ([__file__], -1, "is not one of .jsonl"),
    ],
)
def test_files_that_cannot_be_read_name_the_key(files: list[str], limit: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tasks(files, DataConfig(), limit, validation=True)
    assert words in str(caught.value)


def test_parquet_rows_are_tasks_too(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    messages = [[{"role": "user", "content": "2 + 2"}], [{"role": "user", "content": "3 + 3", "name": "Ann"}]]
    rows = {
        "prompt": messages,
        "reward_model": [{"ground_truth": "4"}, {"ground_truth": "6"}],
        "data_source": ["sums"] * 2,
    }
    parquet.write_table(pa.table(rows), tmp_path / "sums.parquet")
    first, second = load_tasks([str(tmp_path / "sums.parquet")], DataConfig(shuffle=False), -1).take(2)
    assert first.messages == ({"role": "user", "content": "2 + 2"},)
    assert (second.uid, second.ground_truth, second.data_source) == ("sums.parquet:2", "6", "sums")
    assert second.messages[0]["name"] == "Ann"


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        load_tasks([write_lines(tmp_path / "a.parquet", "hello")], DataConfig(), -1)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"treadle\[parquet\]"):
        load_tasks([write_lines(tmp_path / "a.parquet", "")], DataConfig(), -1)
    with pytest.raises(ConfigError, match=r"treadle\[reasoning-gym\]"):
        load_tasks(["reasoning_gym:chain_sum"], DataConfig(), -1)


def gym_data(**options: Any) -> DataConfig:
    files = ("reasoning_gym:chain_sum",)
    return DataConfig(train_files=files, val_files=files, source_kwargs={"chain_sum": {"size": 5, **options}})


def test_reasoning_gym_makes_the_same_tasks_from_the_same_seed() -> None:
    first, again = (list(load_training_tasks(gym_data())) for _ in range(2))
    assert first == again and len(first) == 5
    assert all(task.extra["entry"]["answer"] == task.ground_truth for task in first)
    assert {task.data_source for task in first} == {"reasoning_gym:chain_sum"}
    assert sorted(uids(first))[0] == "reasoning_gym:chain_sum@42:0"
    assert uids(load_training_tasks(gym_data(seed=7)))[0].startswith("reasoning_gym:chain_sum@7:")


def test_training_and_validation_draw_different_tasks_from_one_generator() -> None:
    training, validation = load_training_tasks(gym_data()), load_validation_tasks(gym_data())
    questions = [{task.messages[0]["content"] for task in source} for source in (training, validation)]
    assert not questions[0] & questions[1]


@pytest.mark.parametrize(
    ("files", "kwargs", "words"),
    [
        (("reasoning_gym:chain_some",), {}, "did you mean 'chain_sum'"),
        (
            ("reasoning_gym:chain_sum",),
            {"chain_sum": {"sise": 3}},
            "data.source_kwargs.chain_sum: reasoning-gym refuses",
        ),
        (("reasoning_gym:chain_sum",), {"chain_sum": {"size": -3}}, "size must be positive"),
        (("reasoning_gym:chain_sum",), {"chain_sum": 3}, "data.source_kwargs.chain_sum: must be a map"),
        (("reasoning_gym:chain_sum",), {"chain_sun": {}}, "data.source_kwargs.chain_sun: no generator of this name"),
    ],
)
def test_wrong_generators_and_arguments_are_named(files: tuple[str, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_tasks(DataConfig(train_files=files, source_kwargs=kwargs))
    assert words in str(caught.value)


def mixed(weights: tuple[float, ...], *, counts: tuple[int, ...] = (10, 3), shuffle: bool = True) -> TaskSource:
    files = [f"f{at}" for at in range(len(counts))]
    tasks = [Task(f"f{at}:{number}", ()) for at, count in enumerate(counts) for number in range(count)]
    return TaskSource(tasks, shuffle=shuffle, seed=7, shares=share_draws(files, counts, weights))


@given(
    counts=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    weights=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    shuffle=st.booleans(),
    cut=st.integers(0, 40),
)
def test_files_have_their_shares_and_no_task_is_far_ahead_of_its_siblings(counts, weights, shuffle, cut) -> None:
    total = sum(counts)
    if any(total * weight / sum(weights) < 1 for weight in weights):
        return
    source = mixed(weights, counts=counts, shuffle=shuffle)
    epochs = [uids(source) for _ in range(4)]
    drawn = [uid.partition("+")[0] for epoch in epochs for uid in epoch]
    assert all(len(set(epoch)) == len(epoch) == total for epoch in epochs), "names of an epoch are different"
    for at, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        times = Counter(uid for uid in drawn if uid.startswith(f"f{at}:"))
        assert abs(times.total() - 4 * total * weight / sum(weights)) <= 4
        assert max(times.values()) - min(times[f"f{at}:{number}"] for number in range(count)) <= 1
    again = mixed(weights, counts=counts, shuffle=shuffle)
    again.take(cut)
    resumed = mixed(weights, counts=counts, shuffle=shuffle)
    resumed.restore(SourceState(**json.loads(json.dumps(asdict(again.state())))))
    assert uids(resumed.take(total)) == uids(again.take(total))
    assert uids([source.at(position) for position in range(2 * total)]) == [
        uid for epoch in epochs[:2] for uid in epoch
    ]


def test_every_batch_has_the_shares() -> None:
    source = mixed((1, 1), counts=(90, 10))
    for _ in range(30):
        batch = uids(source.take(10))
        assert 4 <= sum(uid.startswith("f1:") for uid in batch) <= 6


def test_a_run_with_other_weights_cannot_be_resumed() -> None:
    state = mixed((1, 1)).state()
    with pytest.raises(ConfigError, match=r"data\.train_weights: the run was started with other shares"):
        mixed((3, 1)).restore(state)
    with pytest.raises(ConfigError, match=r"data\.train_weights"):
        mixed(()).restore(state)
    plain = mixed(()).state()
    mixed(()).restore(SourceState(**{name: value for name, value in asdict(plain).items() if name != "shares"}))


def test_weights_are_read_from_the_config_and_count_in_training_alone(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", *(f'{{"prompt": "{at}"}}' for at in range(9)))
    two = write_lines(tmp_path / "two.jsonl", '{"prompt": "x"}')
    data = DataConfig(train_files=(one, two), val_files=(one, two), train_weights=(1, 1))
    drawn = uids(load_training_tasks(data))
    assert len(drawn) == 10 and sum(uid.startswith("two.jsonl:1") for uid in drawn) == 5
    assert {"two.jsonl:1", "two.jsonl:1+1", "two.jsonl:1+4"} <= set(drawn)
    assert len(set(uids(load_validation_tasks(data)))) == 10
    limited = DataConfig(train_files=(one, two), train_weights=(1, 1), train_max_samples=9)
    with pytest.raises(ConfigError, match=r"two\.jsonl has no tasks within data\.train_max_samples"):
        load_training_tasks(limited)
    with pytest.raises(ConfigError, match="less than one of the 10 draws of an epoch"):
        load_training_tasks(DataConfig(train_files=(one, two), train_weights=(100, 1)))


def test_a_weight_is_missing_or_not_above_0(tmp_path: Path) -> None:
    text = "model: {path: x}\ndata: {train_files: [a, b], train_weights: %s}"
    with pytest.raises(ConfigError, match=r"1 weights for 2 entries of data\.train_files"):
        loads(text % "[1]", "test")
    with pytest.raises(ConfigError, match=r"data\.train_weights: item 1: must be > 0"):
        loads(text % "[1, 0]", "test")


def test_seeds_are_tasks_without_a_prompt_and_validation_has_others():
    data = DataConfig(train_files=("seeds:3",), val_files=("seeds:2",))
    train, validation = load_training_tasks(data).tasks, load_validation_tasks(data).tasks
    assert [task.environment_kwargs["seed"] for task in train] == [0, 1, 2]
    assert all(not task.messages for task in train)
    assert not {task.uid for task in train} & {task.uid for task in validation}
    with pytest.raises(ConfigError, match="write seeds:1000"):
        load_training_tasks(DataConfig(train_files=("seeds:many",)))
