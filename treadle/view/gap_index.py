"""Gap index of the viewer: of each annotated trajectory the token on which sampler and trainer differ most.

Computed from the journal's arrays as far as one question has time for, in the order of annotation; the next question
goes on. Kept in memory: one entry for each annotated trajectory.
"""

import threading
import time
from collections.abc import Mapping

from treadle.inspect.gaps import TokenGap, largest_gap
from treadle.journal import JournalReader
from treadle.view.run_pages import RunPages

BUDGET_S = 0.4
_BATCH = 200


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
            while rows := reader.annotated_rows(after=self._through, limit=_BATCH):
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
