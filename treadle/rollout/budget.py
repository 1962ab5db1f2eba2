"""The failure budget: how many trajectories may fail, for reasons that are not the model's, before a run ends."""

from collections import Counter

from treadle.config import FailureConfig
from treadle.errors import Boundary, BudgetSpent
from treadle.types import Outcome


class FailureBudget:
    """Counts finished trajectories; raises when failures are more than the config allows."""

    def __init__(self, failures: FailureConfig) -> None:
        self._failures = failures
        self._finished = 0
        self._failed: Counter[Boundary] = Counter()
        self._last: dict[Boundary, str] = {}

    def add(self, outcome: Outcome) -> None:
        """Count an outcome; raise BudgetSpent, with the causes, when too many have failed."""
        failures = self._failures
        self._finished += 1
        if outcome.boundary is None:
            return
        self._failed[outcome.boundary] += 1
        self._last[outcome.boundary] = outcome.detail
        failed = self._failed.total()
        if self._finished >= failures.min_finished and failed > failures.max_failed_fraction * self._finished:
            raise BudgetSpent(self._report(failed))

    def _report(self, failed: int) -> str:
        allowed = f"rollout.failures.max_failed_fraction allows {self._failures.max_failed_fraction:g}"
        causes = (f"  {count} × {boundary}: {self._last[boundary]}" for boundary, count in self._failed.most_common())
        return "\n".join([f"{failed} of {self._finished} trajectories failed; {allowed}", *causes])
