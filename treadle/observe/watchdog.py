"""Stall watchdog: reports by name what has been waited for too long.

Owns when a wait is reported. Knows neither engines nor sessions: a callable lists the open waits. Uses the given
clock, so virtual time works.
Invariant: a wait is reported once it is `stall_report_s` old, and again each time its age has doubled; at most a tenth
of `stall_report_s` late. One timer, no matter how many waits are open.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_LATENESS = 0.1
_CLOCK_SLACK = 1e-3
_MAX_LISTED = 10
_MAX_RECORDED = 100


@dataclass(frozen=True, slots=True)
class Wait:
    """An open wait of one session."""

    uid: str
    sample: int
    stage: str
    """What is waited for: generate, tool, score, …"""
    since: float
    """When it began, on the watch's clock."""
    server: str = ""
    """Replica, tool or scorer that has not answered."""
    last_event: str = ""
    """The last thing that happened to the session."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """The waits that came due together, oldest first."""

    now: float
    waits: tuple[Wait, ...]

    def text(self) -> str:
        """As text: the oldest waits by name, and how many more there are of which kind."""
        listed, rest = self.waits[:_MAX_LISTED], self.waits[_MAX_LISTED:]
        lines = [f"waiting: {self._describe(wait)}" for wait in listed]
        kinds = Counter((wait.stage, wait.server) for wait in rest)
        lines += [f"waiting: {count} more in {_place(*kind)}" for kind, count in kinds.most_common(_MAX_LISTED)]
        return "\n".join(lines)

    def fields(self) -> dict[str, Any]:
        """For the journal, as the fields of an event."""
        recorded = [
            {
                "uid": wait.uid,
                "sample": wait.sample,
                "age_s": round(self.now - wait.since, 3),
                "stage": wait.stage,
                "server": wait.server,
                "last_event": wait.last_event,
            }
            for wait in self.waits[:_MAX_RECORDED]
        ]
        return {"count": len(self.waits), "waits": recorded}

    def _describe(self, wait: Wait) -> str:
        last = f"; last: {wait.last_event}" if wait.last_event else ""
        return f"{wait.uid}/{wait.sample} for {self.now - wait.since:.0f} s in {_place(wait.stage, wait.server)}{last}"


def _place(stage: str, server: str) -> str:
    return f"{stage} on {server}" if server else stage


class StallWatchdog:
    """Checks the open waits when the next of them can be due, and reports those that are."""

    def __init__(
        self,
        stall_report_s: float,
        waits: Callable[[], Iterable[Wait]],
        report: Callable[[StallReport], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._stall_report_s = stall_report_s
        self._waits = waits
        self._report = report
        self._clock = clock
        self._due: dict[tuple[str, int, str, str, float], float] = {}

    async def run(self) -> None:
        """Watch until cancelled. Belongs into the caller's TaskGroup."""
        clock = self._clock or asyncio.get_running_loop().time
        while True:
            idle_s = self.check(clock())
            await asyncio.sleep(idle_s)

    def check(self, now: float) -> float:
        """Report what is due; how long from now nothing else can be."""
        due_before, self._due = self._due, {}
        stalled = []
        for wait in self._waits():
            key = (wait.uid, wait.sample, wait.stage, wait.server, wait.since)
            due = due_before.get(key, wait.since + self._stall_report_s)
            if due <= now + _CLOCK_SLACK * self._stall_report_s:
                stalled.append(wait)
                due = now + (now - wait.since)
            self._due[key] = due
        if stalled:
            self._report(StallReport(now, tuple(sorted(stalled, key=lambda wait: wait.since))))
        # A wait that begins after this moment is due no sooner than `stall_report_s` from now.
        next_due = min(self._due.values(), default=now + self._stall_report_s)
        return max(min(next_due - now, self._stall_report_s), _LATENESS * self._stall_report_s)
