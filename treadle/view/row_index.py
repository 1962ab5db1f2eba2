"""Row, echo and gap index of the viewer: policy versions, tools, echoes and the largest gap of a trajectory

Versions, tools and echoes (how an agent's copy of a turn came back to the gateway) are read from the newest trajectory
to the oldest, gaps of sampler and trainer in the order of annotation; each as far as one question has time for. An
answer says how far that was, and the next question goes on. Kept in memory: one entry for each trajectory, shared
between those that are alike, one number for each kind of echo of a trajectory, and one gap for each that is annotated.
"""

import threading
import time
from array import array
from collections.abc import Mapping

from treadle.inspect.gaps import TokenGap, largest_gap
from treadle.journal import JournalReader
from treadle.view.queries import RunQuery
from treadle.view.run_pages import RunPages

BUDGET_S = 0.4
_BATCH = 100
"""Trajectories that are read at once."""
_GAP_BATCH = 200
"""Annotated rows that are read at once."""

_Entry = tuple[frozenset[int], frozenset[str]]
"""Versions and tools."""


class _NewestFirst:
    """Index that reads trajectories of a table from the newest to the oldest, as far as a question has time for."""

    _table: str

    def __init__(self, pages: RunPages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self._from = self._through = 0
        """Trajectories from `_from` to `_through` were read."""

    def _fill(self, query: RunQuery) -> float:
        """What is new first, then backwards to the oldest; the share that was read."""
        ends = time.monotonic() + BUDGET_S
        span = f"SELECT ifnull(min(trajectory), 1), ifnull(max(trajectory), 0) FROM {self._table}"
        oldest, newest = map(int, query.one(span))
        if not self._through:
            self._from = newest + 1
            self._through = newest
        while self._through < newest and time.monotonic() < ends:
            upto = min(newest, self._through + _BATCH)
            self._add(query, self._through + 1, upto)
            self._through = upto
        while self._from > oldest and time.monotonic() < ends:
            start = max(oldest, self._from - _BATCH)
            self._add(query, start, self._from - 1)
            self._from = start
        read = self._through - max(self._from, oldest) + 1
        return min(1.0, read / max(newest - oldest + 1, 1))

    def _add(self, query: RunQuery, first: int, last: int) -> None:
        raise NotImplementedError


class RowIndex(_NewestFirst):
    """Versions and tools of one run, by trajectory."""

    _table = "rows"

    def __init__(self, pages: RunPages) -> None:
        super().__init__(pages)
        self._entries: dict[int, _Entry] = {}
        self._alike: dict[_Entry, _Entry] = {}

    def find(self, version: int | None, tool: str | None) -> tuple[list[int], float]:
        """Trajectories with a token of a version and a call of a tool, where asked for; and the share that was read."""
        with self._lock, self._pages.query() as query:
            share = self._fill(query)
            found = [
                id
                for id, (versions, tools) in self._entries.items()
                if (version is None or version in versions) and (tool is None or tool in tools)
            ]
        return found, share

    def _add(self, query: RunQuery, first: int, last: int) -> None:
        found = query.all(
            "SELECT trajectory, versions, turns FROM rows WHERE trajectory BETWEEN ? AND ?", (first, last)
        )
        for id, blob, turns in found:
            versions = frozenset(array("i", bytes(blob))) - {-1}
            tools = frozenset(
                str(call["name"])
                for turn in query.decoded(turns, f"a row of trajectory {id}")
                for call in turn.get("calls", ())
            )
            known = self._entries.get(id)
            entry = (versions, tools) if known is None else (versions | known[0], tools | known[1])
            self._entries[id] = self._alike.setdefault(entry, entry)


class EchoIndex(_NewestFirst):
    """How turns came back in the requests of agents behind the gateway, by trajectory of one run."""

    _table = "texts"

    def __init__(self, pages: RunPages) -> None:
        super().__init__(pages)
        self._ids: dict[str, list[int]] = {}

    def find(self, kind: str) -> tuple[list[int], float]:
        """Trajectories with a turn that came back so; and the share that was read."""
        with self._lock, self._pages.query() as query:
            share = self._fill(query)
            return list(self._ids.get(kind, ())), share

    def _add(self, query: RunQuery, first: int, last: int) -> None:
        found = query.all(
            "SELECT x.trajectory, e.key FROM texts x, "
            "json_each(CASE WHEN json_valid(x.extra) THEN x.extra ELSE '{}' END, '$.gateway.echoes') e "
            "WHERE x.trajectory BETWEEN ? AND ? AND e.type = 'integer' AND e.value > 0",
            (first, last),
        )
        for id, kind in found:
            self._ids.setdefault(str(kind), []).append(id)


class GapIndex:
    """Largest gaps of one run, by trajectory."""

    def __init__(self, pages: RunPages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self._gaps: dict[int, TokenGap] = {}
        self._through = 0

    def read(self) -> tuple[Mapping[int, TokenGap], float]:
        """The gaps that are known by now, and the share of the annotations that was read."""
        ends = time.monotonic() + BUDGET_S
        with self._lock, JournalReader.open(self._pages.run_dir) as reader:
            while rows := reader.annotated_rows(after=self._through, limit=_GAP_BATCH):
                for row in rows:
                    self._through = row.id
                    own = largest_gap([row])
                    known = self._gaps.get(row.trajectory)
                    if own is not None and (known is None or known.row == own.row or abs(known.gap) < abs(own.gap)):
                        self._gaps[row.trajectory] = own
                if time.monotonic() > ends:
                    break
            with self._pages.query() as query:
                last = query.one("SELECT max(id) FROM annotations")[0] if query.has_annotations() else 0
            return dict(self._gaps), min(1.0, self._through / last) if rows and last else 1.0
