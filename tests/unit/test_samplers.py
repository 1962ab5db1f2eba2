"""Task samplers: what the built-in ones choose, what a feed makes of it, and which samplers are refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config.root import DataConfig, HardReplayConfig, SuccessBandConfig
from treadle.data.samplers import HardReplay, SuccessBand, TaskResult, TaskSampler
from treadle.data.task_feed import TaskFeed, load_feed
from treadle.data.task_source import TaskSource, share_draws
from treadle.errors import ConfigError, EngineFailure
from treadle.types import Group, Outcome, Score, StopReason, Task, Trajectory

HERE = __name__


def tasks(count: int) -> list[Task]:
    return [Task(f"t{at}", ()) for at in range(count)]


def result(uid: str, success: float | None, *, failed: int = 0) -> TaskResult:
    return TaskResult(uid, success, success, 0 if success is None else 4, failed)


def band(count: int, *, low: float = 0.2, high: float = 0.8, explore: float = 0.25) -> SuccessBand:
    return SuccessBand(tasks(count), SuccessBandConfig(low=low, high=high, explore=explore))


def replaying(count: int, *, share: float = 0.5, below: float = 0.5) -> HardReplay:
    return HardReplay(tasks(count), HardReplayConfig(share=share, below=below))


def group(uid: str, *rewards: float | None) -> Group:
    ended = Outcome.ended(StopReason.STOP)
    failed = Outcome.failed(EngineFailure("broke"))
    samples = (
        Trajectory(uid, at, (), failed if reward is None else ended, None if reward is None else Score(reward))
        for at, reward in enumerate(rewards)
    )
    return Group(Task(uid, ()), tuple(samples))


def sampled(count: int, sampler: str, **keys: Any) -> TaskFeed:
    source = TaskSource(tasks(count), shuffle=False, seed=0)
    return load_feed(source, DataConfig(sampler=sampler, **keys))


def names(feed: TaskFeed, count: int) -> list[str]:
    return [drawn.task.uid for drawn in feed.draw(count)]


def test_a_result_counts_scored_samples_and_leaves_failed_ones_out() -> None:
    assert TaskResult.of("a", group("a", 1.0, 0.5, None, 0.0), 0.5) == TaskResult("a", 2 / 3, 0.5, 3, 1)
    assert TaskResult.of("a", group("a", None, None), 0.5) == TaskResult("a", None, None, 0, 2)
    assert TaskResult.of("a", None, 0.5) == TaskResult("a", None, None, 0, 0)


def test_the_band_comes_after_the_unseen_and_the_longest_waiting_between() -> None:
    sampler = band(6)
    assert sampler.next(6) == ["t0", "t1", "t2", "t3", "t4", "t5"], "none is drawn twice before all are drawn once"
    success = {"t0": 0.0, "t1": 0.5, "t2": 1.0, "t3": 0.7, "t4": None, "t5": 0.15}
    sampler.tell([result(uid, value) for uid, value in success.items()])
    assert sampler.next(5) == ["t1", "t0", "t3", "t5", "t2"], "each fourth draw is the longest waiting, here t0"
    assert sampler.next(1) == ["t4"], "the others are under way"


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=60, max_size=60), st.floats(0.05, 1.0))
def test_the_band_shuts_no_task_out(history, explore) -> None:
    sampler, waited = band(5, low=0.4, high=0.6, explore=explore), dict.fromkeys([f"t{at}" for at in range(5)], 0)
    for count, success in history:
        chosen = sampler.next(count)
        assert len(chosen) == count
        sampler.tell([result(uid, 0.5 if uid == "t0" else success) for uid in chosen])
        waited = {uid: 0 if uid in chosen else times + count for uid, times in waited.items()}
        assert max(waited.values()) <= 5 / explore + 9 + 1


def test_hard_tasks_come_again_until_they_are_solved() -> None:
    sampler = replaying(4)
    assert sampler.next(4) == ["t0", "t1", "t2", "t3"]
    sampler.tell([result("t0", 0.9), result("t1", 0.4), result("t2", None, failed=4), result("t3", None)])
    assert sampler.next(4) == ["t0", "t1", "t1", "t2"], "half of them hard; a prompt that is too long is not"
    sampler.tell([result("t1", 0.0), result("t1", 0.5), result("t2", 0.0)])
    assert sampler.next(4) == ["t2", "t2", "t3", "t0"], "t1 is solved; where nothing is hard, the turn goes on"


@given(st.data())
@pytest.mark.parametrize("make", [band, replaying])
def test_a_sampler_goes_on_from_its_state_with_the_same_tasks(make, data) -> None:
    one: TaskSampler = make(5)
    for _ in range(6):
        chosen = one.next(data.draw(st.integers(1, 7)))
        one.tell([result(uid, data.draw(st.sampled_from([None, 0.0, 0.5, 1.0]))) for uid in chosen])
        left = one.next(data.draw(st.integers(1, 3)))  # drawn and not told of
        other: TaskSampler = make(5)
        other.load_state(json.loads(json.dumps(one.state())))
        one.tell([result(uid, 0.0) for uid in left])
        other.tell([result(uid, 0.0) for uid in left])
        assert one.state() == other.state()
        assert one.next(8) == other.next(8)
        one.load_state(other.state())


def test_a_feed_renames_what_comes_again_and_tells_each_draw_once_in_order() -> None:
    feed = sampled(2, f"{HERE}:Scripted", sampler_kwargs={"uids": ["t1", "t1", "t0"]})
    assert names(feed, 3) == ["t1", "t1@1", "t0"]
    assert [feed.at(position).repeat for position in range(3)] == [0, 1, 0]
    assert feed.books() == {"sampler": f"{HERE}:Scripted", "tasks": 2, "drawn": 2}
    for position in (2, 0):
        feed.end(position, group("x", 1.0))
    feed.leave(2)
    kept = json.loads(json.dumps(feed.state()))
    later = sampled(2, f"{HERE}:Scripted", sampler_kwargs={"uids": ["t0"]})
    later.restore(kept)
    assert later.at(1).task.uid == "t1@1" and later.position == 3
    later.tell()
    later.end(0, group("x", 1.0))  # trained again after a stop between the two
    later.tell()
    told = [result["uid"] for result in later.state()["sampler"]["states"][0]["told"]]
    assert told == ["t1", "t0"], "in the order of their draws, none twice"
    assert names(later, 1) == ["t0@1"]


def test_files_with_weights_have_a_sampler_each_and_keep_their_shares() -> None:
    files, counts, weights = ["a", "b"], [4, 4], [3.0, 1.0]
    rows = [Task(f"{file}{at}", ()) for file in files for at in range(4)]
    source = TaskSource(rows, shuffle=False, seed=0, shares=share_draws(files, counts, weights))
    feed = load_feed(source, DataConfig(sampler="hard_replay"))
    drawn = feed.draw(8)
    assert [item.task.uid for item in drawn] == ["a0", "a1", "b0", "a2", "a3", "a0@1", "b1", "a1@1"]
    for item in drawn:
        feed.end(item.position, group("x", 0.0 if item.task.uid == "b1" else 1.0))
    feed.tell()
    assert [uid[0] for uid in names(feed, 8)] == [*"aabaaaba"]
    states = feed.state()["sampler"]["states"]
    assert [state["count"] for state in states] == [12, 4]


def test_data_in_a_shuffled_order_reach_the_sampler_in_that_order() -> None:
    source = TaskSource(tasks(8), shuffle=True, seed=1)
    order = [task.uid for task in TaskSource(tasks(8), shuffle=True, seed=1).take(8)]
    assert names(load_feed(source, DataConfig(sampler="success_band")), 8) == order != sorted(order)


class Scripted:
    """Chooses what it is told to; whatever a method is named for in `breaks`, it does wrong."""

    def __init__(self, tasks, uids=("t0",), state=None, breaks="") -> None:
        self.uids, self.told, self.breaks, self.odd = list(uids), [], breaks, state
        if breaks == "init":
            raise KeyError("no such field")

    def next(self, count):
        if self.breaks == "next":
            raise ZeroDivisionError("division by zero")
        return self.odd if self.breaks == "type" else self.uids

    def tell(self, results):
        if self.breaks == "tell":
            raise KeyError("t9")
        self.told += [{"uid": item.uid, "success": item.success} for item in results]

    def state(self):
        if self.breaks == "tuple":
            return (1, 2)
        return {"told": self.told, 3: 4} if self.breaks == "keys" else {"told": self.told, "odd": self.odd}

    def load_state(self, state):
        self.told = list(state["told"])


class Half:
    def __init__(self, tasks) -> None: ...

    def next(self, count): ...


@pytest.mark.parametrize(
    ("sampler", "kwargs", "problem"),
    [
        ("Nothing", {}, f"{HERE} has no 'Nothing'"),
        ("HERE", {}, "is not a class: str"),
        ("Half", {}, r"Half has no tell\(\), state\(\), load_state\(\)"),
        ("Scripted", {"uid": 1}, "data.sampler_kwargs: .*does not take these arguments: .*'uid'"),
        ("Scripted", {"breaks": "init"}, "Scripted could not be made: KeyError: 'no such field'"),
        ("Scripted", {"breaks": "keys"}, r"Scripted: state\(\) comes back from JSON as another value"),
        ("Scripted", {"breaks": "tuple"}, r"Scripted: state\(\) comes back from JSON as another value"),
        ("Scripted", {"state": float("nan")}, r"Scripted: state\(\) must return what JSON can hold"),
    ],
)
def test_a_sampler_that_cannot_work_is_refused_before_the_run(sampler, kwargs, problem) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        sampled(3, f"{HERE}:{sampler}", sampler_kwargs=kwargs)
    assert str(error.value).startswith("data.sampler")


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"uids": ["t0"]}, r"next\(2\) must return 2 uids, it returned 1"),
        ({"uids": ["t0", "t1", "t2"]}, r"next\(2\) must return 2 uids, it returned 3"),
        ({"uids": ["t0", "t7"]}, r"next\(2\) returned 't7', which is the uid of no task it was given"),
        ({"uids": ["t0", 1]}, r"next\(2\) returned 1, which is the uid of no task"),
        ({"breaks": "type"}, r"next\(2\) must return a list of uids, it returned NoneType"),
        ({"breaks": "next"}, r"next\(2\) raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_sampler_that_chooses_wrongly_is_an_error_with_its_name(kwargs, problem) -> None:
    feed = sampled(3, f"{HERE}:Scripted", sampler_kwargs=kwargs)
    with pytest.raises(ConfigError, match=rf"data.sampler: {HERE}:Scripted: {problem}"):
        feed.draw(2)


def test_a_sampler_that_cannot_be_told_is_an_error_with_its_name() -> None:
    feed = sampled(3, f"{HERE}:Scripted", sampler_kwargs={"breaks": "tell"})
    feed.draw(1)
    feed.end(0, None)
    with pytest.raises(ConfigError, match=r"Scripted: tell\(results\) raised KeyError: 't9'"):
        feed.tell()


def test_a_checkpoint_of_another_sampler_is_refused() -> None:
    states = {name: sampled(3, name).state() for name in ("success_band", "hard_replay")}
    in_order = TaskFeed(TaskSource(tasks(3), shuffle=False, seed=0))
    with pytest.raises(ConfigError, match=r"data.sampler: the run was started with hard_replay, this is success_band"):
        sampled(3, "success_band").restore(states["hard_replay"])
    with pytest.raises(ConfigError, match=r"data.sampler: the run was started with no sampler, this is success_band"):
        sampled(3, "success_band").restore(in_order.state())
    with pytest.raises(ConfigError, match=r"data.sampler: the run was started with success_band, this is none"):
        in_order.restore(states["success_band"])
