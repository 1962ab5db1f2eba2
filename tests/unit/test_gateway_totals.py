"""A run says in one line what its agents did, and which habit costs what."""

from dataclasses import replace

from treadle.gateway.session_tree import Fork
from treadle.observe.gateway_totals import FIXES, UNTRAINED, GatewayTotals, describe_gateway
from treadle.observe.step_metrics import describe_batch
from treadle.types import Group, Outcome, Row, StopReason, Task, Trajectory

ROW = Row((1,), (2,), (1,), (0.0,), (0,))


REDUCED = {"forks": {"reduced": 1}, "forked_tokens": {"reduced": 41200}, "asked": {"top_p": 0.5}}


def finished(**counted: object) -> Trajectory:
    return Trajectory("a", 0, (ROW, ROW), Outcome.ended(StopReason.STOP), extra={"gateway": counted})


def test_the_line_has_requests_echoes_and_the_fork_that_costs_most_with_its_fix() -> None:
    totals = GatewayTotals()
    totals.finish(
        finished(
            requests={"chat": 3}, echoes={"exact": 1, "edited": 1}, forks={"edited": 4}, forked_tokens={"edited": 70}
        )
    )
    totals.finish(
        finished(requests={"chat": 1, "messages": 2}, replaced=1, replayed=2, refused={"logit_bias": 1}, **REDUCED)
    )
    line = totals.line()
    assert line is not None and "4 chat, 2 messages requests of 2 sessions in 4 rows" in line
    assert "50% of turns came back" in line
    assert f"1 turns do not train: 1 replaced ({UNTRAINED['replaced']}); " in line
    assert "; 2 retries given the same answer (clients " in line
    assert "; refused: logit_bias (" in line and line.endswith(
        f"5 forks: 1 reduced, 41,200 tokens computed again ({FIXES['reduced']}); 4 edited, 70 tokens computed again"
    )
    assert totals.fields()["requests/chat"] == 4


def test_turns_that_do_not_train_are_said_by_why_with_the_fix_of_each() -> None:
    totals = GatewayTotals()
    totals.finish(finished(requests={"chat": 9}, auxiliary=3, undelivered=1, unfinished=2, replaced=1))
    line = totals.line()
    assert line is not None
    said = line.partition("7 turns do not train: ")[2]
    assert [part.split()[:2] for part in said.split("; ")] == [
        ["3", "auxiliary"],
        ["2", "unfinished"],
        ["1", "replaced"],
        ["1", "undelivered"],
    ]
    assert all(f"({fix})" in said for fix in UNTRAINED.values())


def test_nothing_is_said_where_no_agent_asked() -> None:
    totals = GatewayTotals()
    totals.finish(Trajectory("a", 0, (ROW,), Outcome.ended(StopReason.STOP)))
    assert totals.line() is None


def test_what_is_no_number_is_not_counted() -> None:
    """A loop of the user's may keep anything under this name."""
    totals = GatewayTotals()
    totals.finish(finished(requests={"chat": "many", "messages": 2}, replaced=None, replayed=[1]))
    assert totals.fields() == {"trajectories": 1, "rows": 2, "requests/messages": 2}


def test_every_fork_has_a_fix() -> None:
    assert set(FIXES) == set(Fork)
    assert all(";" not in fix and ")" not in fix for fix in (*FIXES.values(), *UNTRAINED.values()))


def test_a_step_has_the_figures_of_its_agents() -> None:
    counted = finished(requests={"chat": 3}, echoes={"exact": 1, "edited": 1}, ignored={"top_p": 3}, **REDUCED)
    found = describe_gateway([counted, finished(requests={"messages": 1}, unfinished=1, auxiliary=2)])
    assert found["gateway/requests"] == 2.0 and found["gateway/forked_tokens"] == 20_600
    assert found["gateway/forks"] == 0.5 and found["gateway/unchanged"] == 0.5
    assert found["gateway/untrained"] == 1.5 and found["gateway/ignored"] == 1.5 and not found["gateway/refused"]
    assert describe_gateway([replace(counted, extra={})]) == {}
    assert describe_batch([Group(Task("a", ()), (counted,))])["gateway/forked_tokens"] == 41_200
