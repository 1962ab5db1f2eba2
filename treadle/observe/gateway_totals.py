"""Gateway totals: what the agents of a run did with their conversations, summed, with the fix for each costly habit.

Reads `extra["gateway"]` of finished trajectories, for the last line of a run and for the metrics of a step; knows
nothing of how it was counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.types import Trajectory

FIXES: Mapping[str, str] = {
    "reduced": "agents drop reasoning that the chat template shows: use the responses or messages API, which keep it",
    "edited": "agents send back other text than was sampled: let them append the answer as it came",
    "prefix": "agents change messages before turns that they repeat, such as dates or reminders in the system message",
    "rewound": "agents go back and try another way: rows branch there, and every turn trains once",
    "sibling": "agents sample the same messages several times: every sample trains that is not asked for again",
}
"""For why rows fork."""

UNTRAINED: Mapping[str, str] = {
    "replaced": "agents read an answer and asked again: let them go on with it, or set rollout.gateway.train: all",
    "undelivered": "agents hung up before the answer: raise the timeout of their client",
    "auxiliary": "agents asked for another model: let them ask for policy where a turn is to train",
    "unfinished": "sessions ended while they were sampled: let agents wait, or raise the limit that ended them",
}
"""Counters of turns that do not train, and the fix for each."""

_REPLAYED_FIX = "clients lose connections or time out while they wait: raise their timeout"
_REFUSED_FIX = "leave them out: docs/gateway.md has why each would change what is trained"

MAX_NAMES = 1000
"""Different counters of a run; agents may send options of any name."""


class GatewayTotals:
    """Sums counters of trajectories as they finish; a rollout observer."""

    def __init__(self) -> None:
        self.num_trajectories = 0
        self.rows = 0
        self.counts: Counter[str] = Counter()
        """Plain counters by name; those of a map as name/key."""

    def start(self) -> None: ...

    def drop(self) -> None: ...

    def retry(self, finished: Trajectory) -> None:
        self._add(finished)

    def finish(self, finished: Trajectory) -> None:
        self._add(finished)

    def _add(self, finished: Trajectory) -> None:
        counted = finished.extra.get("gateway")
        if not isinstance(counted, Mapping):
            return
        self.num_trajectories += 1
        self.rows += finished.num_rows
        for name, value in counted.items():
            if isinstance(value, Mapping) and name != "asked":
                for key, number in value.items():
                    place = f"{name}/{key}"
                    if isinstance(number, int):
                        self.counts[place if place in self.counts or len(self.counts) < MAX_NAMES else name] += number
            elif isinstance(value, int):
                self.counts[name] += value

    def part(self, name: str) -> dict[str, int]:
        """One map of counters."""
        head = f"{name}/"
        return {key.removeprefix(head): count for key, count in self.counts.items() if key.startswith(head)}

    def fields(self) -> dict[str, Any]:
        """Everything, for an event of the journal."""
        return {"trajectories": self.num_trajectories, "rows": self.rows, **self.counts}

    def line(self) -> str | None:
        """What happened, in one line, and the fix for what cost most; None where no agent asked for anything."""
        requests, echoes, forks = self.part("requests"), self.part("echoes"), self.part("forks")
        if not requests:
            return None
        asked = ", ".join(f"{count} {name}" for name, count in sorted(requests.items()))
        said = [f"gateway: {asked} requests of {self.num_trajectories} sessions in {self.rows} rows"]
        if echoes:
            exact = echoes.get("exact", 0) + echoes.get("equivalent", 0)
            said.append(f"{exact / sum(echoes.values()):.0%} of turns came back as they were sampled")
        said += self._untrained_words()
        if self.counts["replayed"]:
            said.append(f"{self.counts['replayed']} retries given the same answer ({_REPLAYED_FIX})")
        refused = self.part("refused")
        said += [f"refused: {', '.join(sorted(refused))} ({_REFUSED_FIX})"] if refused else []
        if forks:
            said.append(self._fork_words(forks))
        return "; ".join(said)

    def _untrained_words(self) -> list[str]:
        """How many turns do not train, by why, each with its fix; nothing where all do."""
        ranked = sorted((why for why in UNTRAINED if self.counts[why]), key=lambda why: -self.counts[why])
        parts = [f"{self.counts[why]} {why} ({UNTRAINED[why]})" for why in ranked]
        total = sum(self.counts[why] for why in ranked)
        return [f"{total} turns do not train: {'; '.join(parts)}"] if parts else []

    def _fork_words(self, forks: Mapping[str, int]) -> str:
        """Why rows fork, by the tokens that it costs, and the fix for what costs most."""
        tokens = self.part("forked_tokens")
        ranked = sorted(forks, key=lambda why: (-tokens.get(why, 0), -forks[why]))
        parts = [f"{forks[why]} {why}, {tokens.get(why, 0):,} tokens computed again" for why in ranked]
        parts[0] += f" ({FIXES.get(ranked[0], '')})"
        return f"{sum(forks.values())} forks: {'; '.join(parts)}"


def describe_gateway(finished: Sequence[Trajectory]) -> dict[str, float]:
    """Figures of the agents of a batch, over the trajectories that came through the gateway; none without any."""
    totals = GatewayTotals()
    for trajectory in finished:
        totals.finish(trajectory)
    count = totals.num_trajectories
    if not count:
        return {}
    echoes = totals.part("echoes")
    figures = {
        "gateway/requests": sum(totals.part("requests").values()) / count,
        "gateway/forks": sum(totals.part("forks").values()) / count,
        "gateway/forked_tokens": sum(totals.part("forked_tokens").values()) / count,
        "gateway/untrained": sum(totals.counts[name] for name in UNTRAINED) / count,
        "gateway/replayed": totals.counts["replayed"] / count,
        "gateway/refused": sum(totals.part("refused").values()) / count,
        "gateway/ignored": sum(totals.part("ignored").values()) / count,
    }
    if echoes:
        figures["gateway/unchanged"] = (echoes.get("exact", 0) + echoes.get("equivalent", 0)) / sum(echoes.values())
    return figures
