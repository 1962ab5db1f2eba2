import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.errors import Boundary, ToolFailure
from treadle.journal import Journal, JournalReader
from treadle.journal.codec import decode, encode, label, pack_floats, read_row, row_values, unpack_floats
from treadle.types import (
    Outcome,
    Row,
    Score,
    StopReason,
    Task,
    Timing,
    ToolCall,
    ToolResult,
    ToolStatus,
    Trajectory,
    Turn,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def bits(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


@st.composite
def rows(draw: st.DrawFn, logprob: st.SearchStrategy[float] = FLOAT32) -> Row:
    size = draw(st.integers(0, 12))
    return Row(
        prompt_ids=draw(st.lists(INT32, max_size=8).map(tuple)),
        ids=tuple(draw(INT32) for _ in range(size)),
        mask=tuple(draw(st.integers(0, 1)) for _ in range(size)),
        logprobs=tuple(draw(logprob) for _ in range(size)),
        versions=tuple(draw(st.integers(-1, 2**31 - 1)) for _ in range(size)),
    )


@settings(deadline=None)
@given(st.lists(FLOAT32, max_size=20).map(tuple))
def test_float32_logprobs_take_four_bytes_and_come_back_bit_for_bit(logprobs: tuple[float, ...]) -> None:
    blob = pack_floats(logprobs)
    if not any(math.isnan(value) for value in logprobs):
        assert len(blob) == 4 * len(logprobs)
    assert bits(unpack_floats(blob, len(logprobs))) == bits(logprobs)


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=20).map(tuple))
def test_any_logprobs_come_back_bit_for_bit(logprobs: tuple[float, ...]) -> None:
    assert bits(unpack_floats(pack_floats(logprobs), len(logprobs))) == bits(logprobs)


@pytest.mark.parametrize("value", [0.1, 1e300, -1e300, 1e-300])
def test_one_logprob_that_is_no_float32_makes_its_row_exact_in_eight_bytes(value: float) -> None:
    assert len(pack_floats((0.5, value))) == 16
    assert unpack_floats(pack_floats((0.5, value)), 2) == (0.5, value)


@settings(deadline=None)
@given(rows(st.floats(allow_nan=False)))
def test_a_row_comes_back_equal(row: Row) -> None:
    _, _, prompt_ids, *rest = row_values(1, 1, row, bytes(row.mask))
    assert read_row(prompt_ids, *rest) == row  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(JSON)
def test_what_json_can_hold_comes_back_equal(value: object) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, math.inf),
        ({"a": [1, -math.inf]}, {"a": [1, -math.inf]}),
        (MappingProxyType({"a": (1, 2)}), {"a": [1, 2]}),
        ({("a", 1): 2}, {"('a', 1)": 2}),
        ({1: 2}, {"1": 2}),
        ({"a"}, ["a"]),
        (StopReason.STOP, "stop"),
        (
            Timing(1.0),
            {"started_at": 1.0, "total_s": 0.0, "generate_s": 0.0, "tool_s": 0.0, "score_s": 0.0, "queue_s": 0.0},
        ),
        (Path("/x"), "PosixPath('/x')"),
        ({"bad": b"\xff", "nan": [math.inf]}, {"bad": "b'\\xff'", "nan": [math.inf]}),
        ("half a pair \ud800", "half a pair \ud800"),
        ({"half \ud800": "é"}, {"half \ud800": "é"}),
    ],
)
def test_what_json_cannot_hold_is_stored_all_the_same(value: object, expected: object) -> None:
    text = encode(value)
    text.encode()
    assert decode(text) == expected


def test_not_a_number_comes_back_as_such() -> None:
    assert math.isnan(decode(encode([math.nan]))[0])


def test_a_circle_and_a_bottomless_pit_are_cut_off() -> None:
    circle: list[object] = []
    circle.append(circle)
    assert "nested too deep" in encode(circle)
    pit: object = 1
    for _ in range(100_000):
        pit = [pit]
    assert "nested too deep" in encode(pit)


def test_a_label_with_half_a_surrogate_pair_is_spelt_out() -> None:
    assert label("ü\ud800") == "ü\\ud800"
    assert label("plain") == "plain"


def full_trajectory() -> Trajectory:
    call = ToolCall("calculate", {"expression": "1+1", "nested": {"a": [1, 2]}}, "call_0")
    bad_call = ToolCall("claculate", {}, "call_1", problem="no such tool")
    result = ToolResult("2", ToolStatus.OK, 0.5, {"cost": 3}, 0.25, truncated=True)
    bad_result = ToolResult("there is no tool claculate", ToolStatus.INVALID)
    turns = (
        Turn(
            0,
            2,
            3,
            StopReason.STOP,
            (call, bad_call),
            (result, bad_result),
            0.5,
            0.25,
            "replica-0",
            reward=-1.0,
            started_s=2.5,
        ),
        Turn(3, 4, 4, StopReason.LENGTH, replica="replica-1"),
    )
    main = Row((5, 6, 7), (1, 2, 9, 3), (1, 1, 0, 1), (-0.5, -0.25, 0.0, -0.125), (3, 3, -1, 4), turns)
    fork = Row((8, 9), (4,), (1,), (-0.1,), (4,))
    return Trajectory(
        uid="task-ü",
        sample=3,
        rows=(main, fork),
        outcome=Outcome.ended(StopReason.LENGTH),
        reward=Score(0.75, {"exact": 1.0, "format": 0.5}, {"why": "close"}),
        messages=(
            {"role": "user", "content": "What is 1+1?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0"}]},
            {"role": "tool", "content": "2", "tool_call_id": "call_0"},
            {"role": "assistant", "content": "Zwei ✓"},
        ),
        timing=Timing(1.0, 2.0, 0.5, 0.25, 0.125, 4.0),
        attempt=2,
        data_source="sums",
        extra={"note": [1, {"a": None}]},
    )


def stored(trajectory: Trajectory, run_dir: Path) -> Trajectory:
    with Journal.open(run_dir, max_mb=16) as journal:
        journal.add(trajectory)
    with JournalReader.open(run_dir) as reader:
        return [entry.trajectory for entry in reader.trajectories()][-1]


def test_a_trajectory_with_everything_comes_back_equal(tmp_path: Path) -> None:
    assert stored(full_trajectory(), tmp_path) == full_trajectory()


def test_a_failed_trajectory_with_no_rows_comes_back_equal(tmp_path: Path) -> None:
    failed = Trajectory("task", 0, (), Outcome.failed(ToolFailure("no route to host")))
    assert stored(failed, tmp_path) == failed
    assert stored(failed, tmp_path).outcome.boundary is Boundary.TOOL


def test_a_reward_that_is_not_a_number_is_still_a_reward(tmp_path: Path) -> None:
    odd = dataclasses.replace(full_trajectory(), reward=Score(math.nan))
    found = stored(odd, tmp_path).reward
    assert found is not None and math.isnan(found.value)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(
            Trajectory,
            uid=st.sampled_from(["a", "b"]),
            sample=st.integers(0, 3),
            rows=st.lists(rows(), max_size=3).map(tuple),
            outcome=st.just(Outcome.ended(StopReason.STOP)),
            messages=st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()})
            ).map(tuple),
            extra=st.dictionaries(st.text(), JSON, max_size=2),
        ),
        max_size=6,
    )
)
def test_trajectories_that_share_a_task_but_not_a_prompt_do_not_mix(
    tmp_path_factory: pytest.TempPathFactory, trajectories: list[Trajectory]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with Journal.open(run_dir, max_mb=16) as journal:
        for trajectory in trajectories:
            journal.add(trajectory)
    with JournalReader.open(run_dir) as reader:
        last = {(sent.uid, sent.sample): sent for sent in trajectories}
        for (uid, sample), sent in last.items():
            entry = reader.trajectory(uid, sample)
            assert entry is not None
            assert same(entry.trajectory, sent)


def same(left: Trajectory, right: Trajectory) -> bool:
    """Equal, with NaN equal to itself."""
    pairs = zip(left.rows, right.rows, strict=True)
    return all(
        dataclasses.replace(one, logprobs=()) == dataclasses.replace(two, logprobs=())
        and bits(one.logprobs) == bits(two.logprobs)
        for one, two in pairs
    ) and dataclasses.replace(left, rows=()) == dataclasses.replace(right, rows=())


def test_a_task_comes_back_equal(tmp_path: Path) -> None:
    tool_kwargs: Mapping[str, Mapping[str, object]] = {"calculate": {"precision": 2}}
    task = Task(
        "t",
        ({"role": "user", "content": "hi"},),
        42,
        "sums",
        "tool_agent",
        3,
        ("calculate",),
        tool_kwargs,
        {"a": 1},
        {"b": 2},
        {"solution": "answer"},
    )
    plain = Task("u", ())
    with Journal.open(tmp_path, max_mb=16) as journal:
        journal.add_task(task)
        journal.add_task(plain)
    with JournalReader.open(tmp_path) as reader:
        assert reader.task("t") == task
        assert reader.task("u") == plain
        assert reader.task("v") is None
