"""A run says in one line what its agents did, and which habit costs what."""

from treadle.gateway.session_tree import Fork
from treadle.observe.gateway_totals import FIXES, GatewayTotals
from treadle.types import Outcome, Row, StopReason, Trajectory

ROW = Row((1,), (2,), (1,), (0.0,), (0,))


def finished(**counted: object) -> Trajectory:
    return Trajectory("a", 0, (ROW, ROW), Outcome.ended(StopReason.STOP), extra={"gateway": counted})


def test_the_line_has_requests_echoes_and_the_most_frequent_fork_with_its_fix() -> None:
    totals = GatewayTotals()
    totals.finish(finished(requests={"chat": 3}, echoes={"exact": 1, "edited": 1}, forks={"edited": 1, "reduced": 4}))
    totals.finish(finished(requests={"chat": 1, "messages": 2}, replaced=1, replayed=2, refused={"logit_bias": 1}))
    line = totals.line()
    assert line is not None and "4 chat, 2 messages requests of 2 sessions in 4 rows" in line
    assert "50% of turns came back" in line and "1 turns do not train" in line and "2 retries" in line
    assert "refused: logit_bias" in line and f"5 forks, 4 of them reduced: {FIXES['reduced']}" in line
    assert totals.fields()["requests/chat"] == 4


def test_nothing_is_said_where_no_agent_asked() -> None:
    totals = GatewayTotals()
    totals.finish(Trajectory("a", 0, (ROW,), Outcome.ended(StopReason.STOP)))
    assert totals.line() is None


def test_every_fork_has_a_fix() -> None:
    assert set(FIXES) == set(Fork)
