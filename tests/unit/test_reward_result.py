"""What a function may return, and how several make one score."""

import math
from typing import Any

import numpy as np
import pytest

from treadle.reward.result import (
    MAX_RESULT_BYTES,
    Fault,
    ScoreFailure,
    as_worker_result,
    combine,
    decode,
    encode,
    read_score,
)
from treadle.types import Score


@pytest.mark.parametrize(
    ("result", "value"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (-3, -3.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0)]
)
def test_numbers_are_scores(result: Any, value: float) -> None:
    assert read_score(result) == Score(value, {}, {})


def test_a_map_in_verls_shape_is_a_score_with_extra_fields() -> None:
    assert read_score({"score": 1, "acc": True}) == Score(1.0, {}, {"acc": True})


def test_a_score_is_taken_as_it_is() -> None:
    assert read_score(Score(0.5, {"a": 1}, {"b": 2})) == Score(0.5, {"a": 1.0}, {"b": 2})


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (None, Fault.NO_RESULT),
        ("1.0", Fault.NO_RESULT),
        ([1.0], Fault.NO_RESULT),
        ({}, Fault.NO_RESULT),
        ({"reward": 1.0}, Fault.NO_RESULT),
        ({"score": None}, Fault.NO_RESULT),
        (math.nan, Fault.NOT_A_NUMBER),
        (-math.inf, Fault.NOT_A_NUMBER),
        (10**400, Fault.NOT_A_NUMBER),
        (np.float64("nan"), Fault.NOT_A_NUMBER),
        (Score(math.nan), Fault.NOT_A_NUMBER),
        (Score(1.0, {"part": math.nan}), Fault.NOT_A_NUMBER),
    ],
)
def test_what_is_no_finite_number_is_a_failure_of_its_own_kind(result: Any, fault: Fault) -> None:
    with pytest.raises(ScoreFailure) as caught:
        read_score(result)
    assert caught.value.fault is fault


def test_extra_fields_become_plain_json() -> None:
    odd = {"n": np.int64(3), "list": np.arange(3), "set": {1}, "tuple": (1, 2), "object": object, "text": "\udc80é"}
    settled = as_worker_result(Score(1.0, {}, odd))
    assert settled.extra["n"] == 3
    assert settled.extra["list"] == [0, 1, 2]
    assert settled.extra["set"] == [1]
    assert settled.extra["tuple"] == [1, 2]
    assert settled.extra["object"] == "<class 'object'>"


def test_extra_fields_without_bounds_are_refused() -> None:
    with pytest.raises(ScoreFailure) as caught:
        encode(Score(1.0, {}, {"all": "x" * MAX_RESULT_BYTES}))
    assert caught.value.fault is Fault.TOO_LARGE


def test_extra_fields_that_hold_themselves_are_refused() -> None:
    knot: dict[str, Any] = {}
    knot["self"] = knot
    with pytest.raises(ScoreFailure) as caught:
        encode(Score(1.0, {}, knot))
    assert caught.value.fault is Fault.NO_RESULT


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"1", b"[]", b"null", b"\xff", b"{}", b"[" * 100_000),
        *(b'{"score": true}', b'{"fault": "fine", "problem": ""}'),
        *(b'{"score": NaN, "parts": {}, "extra": {}}', b'{"score": 1, "parts": [], "extra": {}}'),
    ],
)
def test_a_garbled_answer_is_a_failure_and_never_a_score(answer: bytes) -> None:
    with pytest.raises(ScoreFailure):
        decode(answer)


def test_the_sum_is_weighted_and_the_parts_are_not() -> None:
    total = combine({"a": Score(1.0), "b": Score(0.5, {"inner": 3.0})}, {"a": 2.0, "b": -1.0})
    assert total == Score(1.5, {"a": 1.0, "b": 0.5, "b/inner": 3.0}, {})


def test_a_field_that_two_functions_report_carries_their_names() -> None:
    scores = {"a": Score(1.0, {}, {"length": 1, "only": 2}), "b": Score(1.0, {}, {"length": 3})}
    assert combine(scores, {"a": 1.0, "b": 1.0}).extra == {"a/length": 1, "only": 2, "b/length": 3}


def test_a_sum_that_overflows_is_a_failure() -> None:
    with pytest.raises(ScoreFailure):
        combine({"a": Score(1e308)}, {"a": 10.0})
